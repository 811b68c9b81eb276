"""Several processes, on Horovod's collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import environment
from tfdist.cluster.spec import ranks
from tfdist.cluster.tf_config import own_tf_config
from tfdist.comm.launchers import RingExtended
from tfdist.comm.replica_collectives import Link, sum_over_replicas
from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.config.horovod_options import HorovodOptions
from tfdist.config.mesh import AXES, DATA, Axis, Mesh
from tfdist.config.sharding_options import Checkpoints, MeshOptions, ShardingOptions, check_size
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.strategies.base import agree_on_seed
from tfdist.strategies.connection import connecting, join_own_cluster, seed_from
from tfdist.strategies.devices import prepare_one_of
from tfdist.strategies.horovod import collectives, library, rendezvous
from tfdist.strategies.horovod.collectives import Alone, Members, Ring, RingLink
from tfdist.strategies.membership import Member
from tfdist.strategies.meshed import Meshed
from tfdist.strategies.multi_worker.strategy import resolver_for
from tfdist.types import ProcessSet

__all__ = ["GradientSum", "Horovod", "create", "process_sets_of"]


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


class Horovod(Meshed, tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """One replica in each of several processes, trained synchronously by Horovod's ring all-reduce.

    Variables get rank 0's initial values, gradients are summed by grouped all-reduces, and what is
    gathered goes by all-gather. Horovod must have been initialised: `tfdist.strategy` does it, with
    a bounded start. Horovod's own functions (`tfdist.horovod`) can be called besides.

    Args:
        device: this process's device, such as `"GPU:0"`.
        gradients: how gradients are exchanged; by default summed as they are, in one group.
        cluster_resolver: the cluster and this task, if the addresses are known.
        rule: the treatment of gradients before the optimizer applies them.
        zero: ZeRO's stage, 0 to 3: the part of the model's state that is divided.
        mesh: the axes of the processes, such as "data=2,model=2"; by default all are data.
        layouts: the rules by which weights are divided along the model axis; by default those that
            follow from the kinds of layers.
        checkpoints: "sharded" if each process writes its part of a saved model, else "whole".
        process_sets: those that Horovod was initialised with: of a mesh, `process_sets_of` it.

    Raises:
        ConfigError: if Horovod is missing, or was built for another TensorFlow; if the mesh is not
            one of the processes, or Horovod does not know its process sets.
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
        mesh: str | None = None,
        layouts: str | None = None,
        checkpoints: Checkpoints = "whole",
        process_sets: Sequence[ProcessSet] = (),
    ) -> None:
        self.rule, self.zero, self.checkpoints = rule, zero, checkpoints
        self._process_sets = process_sets
        self._ring = Ring(library.load())
        self._gradients = gradients or GradientSum()
        self._resolver = cluster_resolver or tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({}), task_type="worker", task_id=self._ring.rank
        )
        # Keras gathers predictions if it sees this base class; see its `_multi_worker_concat`.
        extended = RingExtended(self, device, self._ring, self._along)
        tf.distribute.Strategy.__init__(self, extended)
        self.arrange(mesh, layouts)
        agree_on_seed(self)

    @property
    def cluster_resolver(self) -> object:
        """This process's place among the ranks, and their cluster if it is known."""
        return self._resolver

    def sum_gradients(self, values: Sequence[Any]) -> list[Any]:
        """Sums gradients over the replicas; see `StrategyMixin.sum_gradients`."""
        return self._gradients(self.extended.rings[DATA], values)

    def first_sent(self, values: Sequence[Any]) -> list[Any]:
        """All: Horovod begins when it has them; see `StrategyMixin.first_sent`."""
        return list(values)

    def link(self, axis: str = DATA) -> Link:
        """The processes along an axis. Must be called in a replica context."""
        return RingLink(self.extended.rings[axis])

    def _along(self, axis: Axis) -> Ring | Alone:
        """The ring of the processes along an axis."""
        if axis.size == self._ring.size:
            return self._ring
        if axis.size == 1:
            return Alone()
        for members in self._process_sets:
            if tuple(members.ranks) == axis.ranks:
                return Ring(Members(self._ring.hvd, members))
        raise ConfigError(
            f"The processes {', '.join(map(str, axis.ranks))} are to exchange tensors along the "
            f"axis {axis.name!r} of a mesh, and Horovod was started without a process set of them. "
            "Set the mesh when the job is started, as in `tfdist run --mesh data=2,model=2`."
        )


def process_sets_of(mesh: Mesh, hvd: Any) -> list[ProcessSet]:
    """The process sets of a mesh, with which `hvd.init` must be called on all processes.

    Args:
        mesh: the mesh.
        hvd: the module `horovod.tensorflow`.
    """
    lines = {mesh.axis(name, rank).ranks for name in AXES for rank in range(mesh.processes)}
    # Horovod knows all processes as a set already, and one alone exchanges nothing.
    return [hvd.ProcessSet(line) for line in sorted(lines) if 1 < len(line) < mesh.processes]


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
    mesh, sharding = config.part(MeshOptions), config.part(ShardingOptions)
    process_sets = []
    if mesh.parsed is not None:
        size = len(ranks(member.cluster)) if member else environment.read("HOROVOD_SIZE")
        check_size(mesh.parsed, int(size or 1))
        process_sets = process_sets_of(mesh.parsed, hvd)
    with connecting(member, config, "Horovod"):
        hvd.init(process_sets=process_sets)
    library.shut_down_at_exit(hvd)
    device = prepare_one_of(hvd.local_rank(), hvd.local_size())
    own = config.part(HorovodOptions)
    gradients = GradientSum(reduction=own.reduction, groups=own.groups or 1)
    resolver = None
    if member is not None:
        resolver = resolver_for(member.cluster, member.task, int(device.startswith("GPU")))
    return Horovod(
        device,
        gradients,
        resolver,
        config.part(GradientOptions),
        sharding.zero,
        mesh.mesh,
        mesh.layouts,
        sharding.checkpoints,
        process_sets,
    )
