"""A cluster of servers in the program's own process, as a notebook starts one."""

import json
import multiprocessing
import os
import socket

import keras
import tensorflow as tf


def unused_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def create_in_process_cluster(num_workers, num_ps):
    cluster_dict = {"worker": [f"localhost:{unused_port()}" for _ in range(num_workers)]}
    if num_ps > 0:
        cluster_dict["ps"] = [f"localhost:{unused_port()}" for _ in range(num_ps)]
    cluster_spec = tf.train.ClusterSpec(cluster_dict)

    worker_config = tf.compat.v1.ConfigProto()
    if multiprocessing.cpu_count() < num_workers + 1:
        worker_config.inter_op_parallelism_threads = num_workers + 1

    for i in range(num_workers):
        tf.distribute.Server(
            cluster_spec, job_name="worker", task_index=i, config=worker_config, protocol="grpc"
        )
    for i in range(num_ps):
        tf.distribute.Server(cluster_spec, job_name="ps", task_index=i, protocol="grpc")
    return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


os.environ["GRPC_FAIL_FAST"] = "use_caller"
cluster_resolver = create_in_process_cluster(3, 2)
variable_partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=(256 << 10), max_shards=2
)
strategy = tf.distribute.ParameterServerStrategy(
    cluster_resolver, variable_partitioner=variable_partitioner
)

with strategy.scope():
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(10), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02), loss="mse", steps_per_execution=10)

x = tf.random.stateless_uniform((10, 10), seed=[3, 4])
y = tf.reduce_sum(x, axis=1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat().batch(64)
losses = model.fit(dataset, epochs=4, steps_per_epoch=20, verbose=0).history["loss"]
assert losses[-1] < losses[0] / 2, losses
print("RESULT", json.dumps(losses))
