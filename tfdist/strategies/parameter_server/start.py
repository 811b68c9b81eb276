"""Making the strategy `parameter_server`."""

from __future__ import annotations

import tensorflow as tf

from tfdist.config.server_options import ServerOptions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.strategies.connection import connecting, join_own_cluster, seed_from
from tfdist.strategies.membership import Member
from tfdist.strategies.parameter_server.strategy import ParameterServer

__all__ = ["create"]


def create(config: StrategyConfig, member: Member | None) -> ParameterServer:
    """Makes the strategy of a chief whose workers and servers have joined.

    Args:
        config: the configuration.
        member: the chief, if it has joined its cluster already.

    Raises:
        ConfigError: if a worker sees several GPUs.
    """
    member = member or join_own_cluster(config)
    seed_from(member)
    cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(member.cluster.as_dict()),
        task_type=member.task.type,
        task_id=member.task.index,
        rpc_layer="grpc",
    )
    with connecting(member, config):
        return ParameterServer(cluster, config.part(ServerOptions))
