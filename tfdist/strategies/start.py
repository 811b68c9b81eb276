"""The bounded start of a task of a cluster: join, then TensorFlow."""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from tfdist.cluster.join import identity, join
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.cluster.tf_config import parse_tf_config
from tfdist.config import StrategyConfig
from tfdist.deadline import hard_deadline
from tfdist.errors import ConfigError, StartError
from tfdist.strategies.devices import communication_for, split_cpu
from tfdist.strategies.multi_worker import MultiWorker, resolver_for


def start_multi_worker(text: str, config: StrategyConfig) -> MultiWorker:
    """Makes the strategy of one task, once all tasks are there.

    Args:
        text: this task's TF_CONFIG.
        config: the configuration, the same for all tasks.

    Raises:
        ConfigError: if TF_CONFIG has a mistake, or the task does not compute.
        StartError: if a task does not join before `config.start_timeout`.
    """
    cluster, task = parse_tf_config(text)
    if task is None or task not in cluster.computing:
        raise ConfigError(
            f"TF_CONFIG={text!r} makes this process {task or 'no task'}, but "
            "strategy='multi_worker' runs on tasks of type chief and worker. Correct `task`."
        )
    computing = ClusterSpec(
        {kind: a for kind, a in cluster.addresses.items() if kind in ("chief", "worker")}
    )
    if len(computing.computing) > 1:
        join(computing, task, timeout=config.start_timeout, identity=identity(config.to_json()), report=_say)
    return _start_tensorflow(computing, task, config)


def _start_tensorflow(cluster: ClusterSpec, task: Task, config: StrategyConfig) -> MultiWorker:
    gpus = len(tf.config.list_physical_devices("GPU"))
    if not gpus and (config.devices or 1) > 1:
        split_cpu(config.devices or 1)
    implementation = communication_for(gpus, config.communication)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation[implementation]
    )
    peers = ", ".join(f"{t} at {a}" for t, a in cluster.tasks() if t != task)
    seconds = config.start_timeout
    message = (
        f"{task} gave up after {seconds:.0f} s: all tasks had joined, but TensorFlow did not "
        f"connect to {peers}. One of them ended meanwhile, or a firewall closes the port to gRPC."
    )
    with hard_deadline(seconds, message, StartError.exit_status):
        try:
            return MultiWorker(resolver_for(cluster, task, gpus), options, config.devices or 1)
        except RuntimeError as error:
            if "program startup" in str(error) or "must be configured" in str(error):
                raise ConfigError(
                    "strategy='multi_worker' was made after TensorFlow had started. Make it before "
                    "any other TensorFlow operation of the program, or start the program with "
                    f"`tfdist run`. TensorFlow says: {error}"
                ) from error
            raise


def _say(message: Any) -> None:
    print(f"tfdist: {message}", file=sys.stderr, flush=True)
