"""The bounded start of TensorFlow in a task that has joined its cluster."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist._tensorflow import global_seed
from tfdist.config import StrategyConfig
from tfdist.deadline import hard_deadline
from tfdist.errors import ConfigError, StartError
from tfdist.joining import Member
from tfdist.strategies.devices import communication_for, prepare_devices
from tfdist.strategies.multi_worker import MultiWorker, resolver_for


def start_multi_worker(member: Member, config: StrategyConfig) -> MultiWorker:
    """Makes the strategy of a task that has joined its cluster.

    Args:
        member: the task.
        config: the configuration, the same for all tasks.

    Raises:
        ConfigError: if TensorFlow has started already.
    """
    cluster, task = member.cluster, member.task
    if global_seed() is None:
        keras.utils.set_random_seed(member.seed)
    devices = prepare_devices(config.devices)
    gpus = sum(device.startswith("GPU") for device in devices)
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
            return MultiWorker(resolver_for(cluster, task, gpus), options, len(devices))
        except RuntimeError as error:
            if "program startup" in str(error) or "must be configured" in str(error):
                raise ConfigError(
                    "strategy='multi_worker' was made after TensorFlow had started. Make it before "
                    "any other TensorFlow operation of the program, or start the program with "
                    f"`tfdist run`. TensorFlow says: {error}"
                ) from error
            raise
