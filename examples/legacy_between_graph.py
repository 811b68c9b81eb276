"""A between-graph program of TensorFlow 1: every task of the cluster runs this file.

    tfdist run --every-task -n 2 --ps 1 examples/legacy_between_graph.py
    tfdist run --every-task --task-flags -n 2 --ps 1 examples/legacy_between_graph.py --sync

Each worker builds the graph and trains it with its own batches; the variables are on the parameter
servers. Workers update them whenever they like, or, with --sync, together. A task learns its place
from TF_CONFIG, or from the flags of TensorFlow 1's tutorials.
"""

import argparse
import json
import os
import pathlib
import threading
import time

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1

parser = argparse.ArgumentParser(description="Classify digits, between-graph.")
parser.add_argument("--job_name", help="ps or worker; default: from TF_CONFIG")
parser.add_argument("--task_index", type=int, default=0)
parser.add_argument("--ps_hosts", default="", help="host:port,host:port")
parser.add_argument("--worker_hosts", default="", help="host:port,host:port")
parser.add_argument("--sync", action="store_true", help="average the workers' gradients")
parser.add_argument("--steps", type=int, default=600, help="updates of all workers together")


def place(args):
    """This task's type and index, and the cluster."""
    if args.job_name:
        hosts = {"ps": args.ps_hosts.split(","), "worker": args.worker_hosts.split(",")}
        return args.job_name, args.task_index, hosts
    config = json.loads(os.environ["TF_CONFIG"])  # noqa: TID251 - as such programs do
    return config["task"]["type"], config["task"]["index"], config["cluster"]


def model(images, labels):
    """A network of one hidden layer: its loss and its accuracy."""
    hidden = tf1.get_variable("hidden", [64, 32], initializer=tf1.glorot_uniform_initializer())
    hidden_bias = tf1.get_variable("hidden_bias", [32], initializer=tf1.zeros_initializer())
    output = tf1.get_variable("output", [32, 10], initializer=tf1.glorot_uniform_initializer())
    output_bias = tf1.get_variable("output_bias", [10], initializer=tf1.zeros_initializer())
    logits = tf.nn.relu(images @ hidden + hidden_bias) @ output + output_bias
    loss = tf1.losses.sparse_softmax_cross_entropy(labels, logits)
    right = tf.equal(tf.argmax(logits, 1), tf.cast(labels, tf.int64))
    return loss, tf.reduce_mean(tf.cast(right, tf.float32))


def wait_for_variables(server, config):
    """Until worker 0 has initialized the variables; the session itself looks every 30 s only."""
    missing = tf1.report_uninitialized_variables(tf1.global_variables())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with tf1.Session(server.target, config=config) as session:
            if not session.run(missing).size:
                return
        time.sleep(0.2)


def ignore_cancelled(arguments):
    """With --sync a thread waits for gradients; it is cancelled when the session closes."""
    if not isinstance(arguments.exc_value, tf.errors.CancelledError):
        threading.__excepthook__(arguments)


def main():
    args = parser.parse_args()
    kind, index, hosts = place(args)
    cluster = tf.train.ClusterSpec(hosts)
    workers = len(hosts["worker"])
    # More threads than cores: steps that wait for each other must not hold them all.
    threads = tf1.ConfigProto(inter_op_parallelism_threads=workers + 2)
    server = tf1.train.Server(cluster, job_name=kind, task_index=index, config=threads)
    if kind == "ps":
        server.join()  # Never returns: `tfdist run` stops it when the workers have ended.

    digits = np.loadtxt(pathlib.Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    images, labels = digits[:, :64].astype(np.float32) / 16, digits[:, 64].astype(np.int32)
    own = np.arange(index, 1408, workers)
    random = np.random.default_rng(index)

    tf1.disable_eager_execution()
    device = tf1.train.replica_device_setter(
        worker_device=f"/job:worker/task:{index}", cluster=cluster
    )
    with tf1.device(device):
        step = tf1.train.get_or_create_global_step()
        x = tf1.placeholder(tf.float32, [None, 64])
        y = tf1.placeholder(tf.int32, [None])
        loss, accuracy = model(x, y)
        optimizer = tf1.train.AdamOptimizer(0.01)
        hooks = [tf1.train.StopAtStepHook(last_step=args.steps)]
        if args.sync:
            optimizer = tf1.train.SyncReplicasOptimizer(optimizer, workers, workers)
        train = optimizer.minimize(loss, global_step=step)
        if args.sync:
            hooks.append(optimizer.make_session_run_hook(is_chief=index == 0))
            threading.excepthook = ignore_cancelled

    config = tf1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{index}"])
    if index:
        wait_for_variables(server, config)
    session = tf1.train.MonitoredTrainingSession(
        server.target,
        is_chief=index == 0,
        hooks=hooks,
        config=config,
        log_step_count_steps=None,
        stop_grace_period_secs=1,
    )
    steps = 0
    with session:
        while not session.should_stop():
            batch = random.choice(own, 64)
            session.run(train, {x: images[batch], y: labels[batch]})
            steps += 1
    print(f"worker {index} trained {steps} steps")

    # The variables are still on the parameter servers.
    with tf1.Session(server.target, config=config) as session:
        unseen = {x: images[1408:], y: labels[1408:]}
        done, right = session.run([step, accuracy], unseen)
    print(f"after {done} updates: accuracy on unseen digits {right:.2%}")


if __name__ == "__main__":
    main()
