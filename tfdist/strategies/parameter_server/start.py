"""Making the strategy `parameter_server`."""

from __future__ import annotations

import tensorflow as tf

from tfdist.config.strategy_config import StrategyConfig
from tfdist.strategies.connection import connecting, join_own_cluster, seed_from
from tfdist.strategies.membership import Member
from tfdist.strategies.parameter_server.servers import UpdateRule
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
        return ParameterServer(
            cluster,
            rule_of(config, len(member.cluster.computing) - 1),
            config.wire_dtype,
            config.min_shard_bytes,
            config.max_shards,
            config.step_timeout,
        )


def rule_of(config: StrategyConfig, workers: int) -> UpdateRule:
    """When a gradient becomes an update, as the configuration says.

    Args:
        config: the configuration.
        workers: how many workers the cluster has.
    """
    return UpdateRule(
        mode=config.mode,
        staleness=config.staleness,
        on_stale=config.on_stale,
        workers=workers,
        backup_workers=config.backup_workers,
    )
