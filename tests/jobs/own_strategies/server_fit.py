"""`fit` on a ParameterServerStrategy of the program's own, with a branch for servers."""

import json
import os

import keras
import tensorflow as tf

cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if cluster_resolver.task_type in ("worker", "ps"):
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    server = tf.distribute.Server(
        cluster_resolver.cluster_spec(),
        job_name=cluster_resolver.task_type,
        task_index=cluster_resolver.task_id,
        protocol=cluster_resolver.rpc_layer or "grpc",
        start=True,
    )
    server.join()

variable_partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=(256 << 10), max_shards=cluster_resolver.cluster_spec().num_tasks("ps")
)
strategy = tf.distribute.ParameterServerStrategy(
    cluster_resolver, variable_partitioner=variable_partitioner
)


def dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(64)
    x = tf.random.stateless_uniform((10, 10), seed=[3, 4])
    y = tf.reduce_sum(x, axis=1, keepdims=True)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat()
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return dataset.batch(batch_size).prefetch(2)


with strategy.scope():
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(10), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02), loss="mse", steps_per_execution=5)

dataset = strategy.distribute_datasets_from_function(dataset_fn)
history = model.fit(
    dataset,
    epochs=4,
    steps_per_epoch=20,
    callbacks=[keras.callbacks.ModelCheckpoint("my.weights.h5", save_weights_only=True)],
    verbose=0,
)
losses = history.history["loss"]
assert losses[-1] < losses[0] / 2, losses
assert os.path.exists("my.weights.h5")
print("RESULT", json.dumps(losses))
