"""Several processes, on Horovod's collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster.tf_config import own_tf_config
from tfdist.comm import batch_sharding
from tfdist.comm.launchers import RingExtended
from tfdist.comm.replica_collectives import Link, sum_over_replicas
from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.config.horovod_options import HorovodOptions
from tfdist.config.mesh import DATA
from tfdist.config.sharding_options import Checkpoints, ShardingOptions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.strategies.base import StrategyMixin, agree_on_seed
from tfdist.strategies.connection import connecting, join_own_cluster, seed_from
from tfdist.strategies.devices import prepare_one_of
from tfdist.strategies.horovod import collectives, library, rendezvous
from tfdist.strategies.horovod.collectives import Ring, RingLink
from tfdist.strategies.membership import Member
from tfdist.strategies.multi_worker.strategy import resolver_for

__all__ = ["GradientSum", "Horovod", "create"]


# Exchanges of gradients on Horovod: in groups, or by Adasum.


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientSum:
    """Sums gradients over the processes.

    Attributes:
        reduction: a key of `horovod_options.REDUCTIONS`.
        groups: the number of groups of dense gradients; each goes as soon as it is complete.
    """

    reduction: str = "mean"
    groups: int = 1

    def __call__(self, ring: Ring, values: Sequence[Any]) -> list[Any]:
        """The sums, on each process.

        Args:
            ring: the processes.
            values: for each weight a dense tensor or `IndexedSlices`, which stay sparse unless they
                go by Adasum.
        """
        if self.reduction == "adasum":
            dense = [tf.convert_to_tensor(value) * ring.size for value in values]
            return collectives.combine(ring, dense)
        sparse = [i for i, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
        dense_indices = [i for i in range(len(values)) if i not in sparse]
        # The last layers' gradients are there first.
        dense_indices.reverse()
        sums = dict(zip(sparse, sum_over_replicas([values[i] for i in sparse]), strict=True))
        dense = [values[i] for i in dense_indices]
        summed = ring.sum(dense, self.groups) if dense else []
        sums.update(zip(dense_indices, summed, strict=True))
        return [sums[i] for i in range(len(values))]


class Horovod(StrategyMixin, tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """One replica in each of several processes, trained synchronously by Horovod's ring all-reduce.

    Variables get rank 0's initial values, gradients are summed by grouped all-reduces, and what is
    gathered goes by all-gather. Horovod must have been initialised: `tfdist.strategy` does it, with
    a bounded start. Horovod's own functions (`tfdist.horovod`) can be called besides.

    Args:
        device: this process's device, such as `"GPU:0"`.
        gradients: how gradients are exchanged; by default summed as they are, in one group.
        cluster_resolver: the cluster and this task, if the addresses are known.
        rule: the treatment of gradients before the optimizer applies them.
        zero: ZeRO's stage, 0 to 2: the part of the model's state that is divided.
        checkpoints: "sharded" if each process writes its part of a saved model, else "whole".

    Raises:
        ConfigError: if Horovod is missing, or was built for another TensorFlow.
        ValueError: if Horovod has not been initialised.
    """

    name = "horovod"

    def __init__(
        self,
        device: str = "CPU:0",
        gradients: GradientSum | None = None,
        cluster_resolver: object = None,
        rule: GradientOptions = PLAIN,
        zero: int = 0,
        checkpoints: Checkpoints = "whole",
    ) -> None:
        self.rule, self.zero, self.checkpoints = rule, zero, checkpoints
        self._ring = Ring(library.load())
        self._gradients = gradients or GradientSum()
        self._resolver = cluster_resolver or tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({}), task_type="worker", task_id=self._ring.rank
        )
        # Keras gathers predictions if it sees this base class; see its `_multi_worker_concat`.
        tf.distribute.Strategy.__init__(self, RingExtended(self, device, self._ring))
        agree_on_seed(self)

    @property
    def cluster_resolver(self) -> object:
        """This process's place among the ranks, and their cluster if it is known."""
        return self._resolver

    @property
    def shard(self) -> batch_sharding.Shard:
        """This process's part of the data."""
        return batch_sharding.Shard(workers=self._ring.size, worker=self._ring.rank, local=1)

    def sum_gradients(self, values: Sequence[Any]) -> list[Any]:
        """Sums gradients over the replicas; see `StrategyMixin.sum_gradients`."""
        return self._gradients(self._ring, values)

    def link(self, axis: str = DATA) -> Link:
        """The replicas as the calling one sees them; see `StrategyMixin.link`."""
        del axis
        return RingLink(self._ring)


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
