"""Making the strategy `horovod`."""

from __future__ import annotations

from tfdist.cluster.tf_config import own_tf_config
from tfdist.config.gradient_options import GradientOptions
from tfdist.config.horovod_options import HorovodOptions
from tfdist.config.sharding_options import ShardingOptions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.strategies.connection import connecting, join_own_cluster, seed_from
from tfdist.strategies.devices import prepare_one_of
from tfdist.strategies.horovod import library, rendezvous
from tfdist.strategies.horovod.strategy import GradientSum, Horovod
from tfdist.strategies.membership import Member
from tfdist.strategies.multi_worker.strategy import resolver_for

__all__ = ["create"]


def create(config: StrategyConfig, member: Member | None) -> Horovod:
    """Initialises Horovod and makes the strategy of a process that trains with it.

    Args:
        config: the configuration, the same for all processes.
        member: the task, if it has joined its cluster already.

    Raises:
        ConfigError: if Horovod is missing, or was built for another TensorFlow; or if an option
            conflicts with the environment.
    """
    hvd = library.load()  # Before anybody is waited for.
    if member is None and not (rendezvous.started_by_horovodrun() and own_tf_config() is None):
        member = join_own_cluster(config)
    cluster, task, offered = (member.cluster, member.task, member.offer) if member else (None,) * 3
    rendezvous.prepare(config, cluster, task, offered or {})
    if member is not None:
        seed_from(member)
    with connecting(member, config, "Horovod"):
        hvd.init()
    device = prepare_one_of(hvd.local_rank(), hvd.local_size())
    own = config.part(HorovodOptions)
    gradients = GradientSum(reduction=own.reduction, groups=own.groups or 1)
    resolver = None
    if member is not None:
        resolver = resolver_for(member.cluster, member.task, int(device.startswith("GPU")))
    sharding = config.part(ShardingOptions)
    rule = config.part(GradientOptions)
    return Horovod(device, gradients, resolver, rule, sharding.zero, sharding.checkpoints)
