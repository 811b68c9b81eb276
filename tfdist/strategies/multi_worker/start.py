"""Making the strategy `multi_worker`."""

from __future__ import annotations

import tensorflow as tf

from tfdist.config.gradient_options import GradientOptions
from tfdist.config.sharding_options import MeshOptions, ShardingOptions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.strategies.connection import connecting, join_own_cluster, seed_from
from tfdist.strategies.devices import communication_for, prepare_devices
from tfdist.strategies.membership import Member
from tfdist.strategies.multi_worker.strategy import MultiWorker, resolver_for

__all__ = ["create"]


def create(config: StrategyConfig, member: Member | None) -> MultiWorker:
    """Makes the strategy of a task of a cluster.

    Args:
        config: the configuration, the same for all tasks.
        member: the task, if it has joined its cluster already.

    Raises:
        ConfigError: if TensorFlow has started already.
    """
    member = member or join_own_cluster(config)
    cluster, task = member.cluster, member.task
    seed_from(member)
    devices = prepare_devices(config.devices)
    gpus = sum(device.startswith("GPU") for device in devices)
    implementation = communication_for(gpus, config.communication)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation[implementation]
    )
    mesh, sharding = config.part(MeshOptions), config.part(ShardingOptions)
    with connecting(member, config):
        try:
            return MultiWorker(
                resolver_for(cluster, task, gpus),
                options,
                len(devices),
                config.part(GradientOptions),
                sharding.zero,
                mesh.mesh,
                mesh.layouts,
                sharding.checkpoints,
            )
        except RuntimeError as error:
            if "program startup" in str(error) or "must be configured" in str(error):
                raise ConfigError(
                    "strategy='multi_worker' was made after TensorFlow had started. Make it before "
                    "any other TensorFlow operation of the program, or start the program with "
                    f"`tfdist run`. TensorFlow says: {error}"
                ) from error
            raise
