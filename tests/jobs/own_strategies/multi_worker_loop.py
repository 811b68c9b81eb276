"""A loop by hand on a MultiWorkerMirroredStrategy of the program's own, with its checkpoints."""

import json
import os
import sys

import keras
import numpy as np
import tensorflow.compat.v2 as tf

strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy(
    communication=tf.distribute.experimental.CollectiveCommunication.RING
)
global_batch_size = int(sys.argv[1]) * strategy.num_replicas_in_sync
num_epochs, num_steps_per_epoch = 2, 4


def dataset_fn(global_batch_size, input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    rng = np.random.default_rng(7)
    x = rng.random((128, 8, 8), dtype="float32")
    y = (x.mean(axis=(1, 2)) * 1000).astype("int64") % 4
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return dataset.batch(batch_size)


with strategy.scope():
    keras.utils.set_random_seed(7)
    multi_worker_dataset = strategy.distribute_datasets_from_function(
        lambda input_context: dataset_fn(global_batch_size, input_context)
    )
    multi_worker_model = keras.Sequential(
        [
            keras.layers.InputLayer(shape=(8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(4),
        ]
    )
    optimizer = keras.optimizers.RMSprop(learning_rate=0.01)
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")


@tf.function
def train_step(iterator):
    def step_fn(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            predictions = multi_worker_model(x, training=True)
            per_example_loss = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=None
            )(y, predictions)
            loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=global_batch_size)
            model_losses = multi_worker_model.losses
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        grads = tape.gradient(loss, multi_worker_model.trainable_variables)
        optimizer.apply_gradients(zip(grads, multi_worker_model.trainable_variables, strict=True))
        train_accuracy.update_state(y, predictions)
        return loss

    per_replica_losses = strategy.run(step_fn, args=(next(iterator),))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


epoch = tf.Variable(initial_value=tf.constant(0, dtype=tf.int64), name="epoch")
step_in_epoch = tf.Variable(initial_value=tf.constant(0, dtype=tf.int64), name="step_in_epoch")
task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
chief = task_type in (None, "chief") or (
    task_id == 0 and "chief" not in strategy.cluster_resolver.cluster_spec().as_dict()
)
folder = "ckpt" if chief else os.path.join("ckpt", f"workertemp_{task_id}")
checkpoint = tf.train.Checkpoint(
    model=multi_worker_model, epoch=epoch, step_in_epoch=step_in_epoch, optimizer=optimizer
)
manager = tf.train.CheckpointManager(checkpoint, directory=folder, max_to_keep=1)
latest_checkpoint = tf.train.latest_checkpoint("ckpt")
if latest_checkpoint:
    checkpoint.restore(latest_checkpoint)

results = []
while epoch.numpy() < num_epochs:
    iterator = iter(multi_worker_dataset)
    total_loss, num_batches = 0.0, 0
    while step_in_epoch.numpy() < num_steps_per_epoch:
        total_loss += train_step(iterator)
        num_batches += 1
        step_in_epoch.assign_add(1)
    results += [float(total_loss / num_batches), float(train_accuracy.result())]
    train_accuracy.reset_state()
    manager.save()
    epoch.assign_add(1)
    step_in_epoch.assign(0)
print("CHIEF", chief)
print("RESULT", json.dumps(results))
