"""Several processes, on TensorFlow's own collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tfdist._tf.distribute import CollectiveExtended
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.comm import batch_sharding
from tfdist.comm.launchers import replace_launchers
from tfdist.comm.replica_collectives import LineLink, Link
from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.config.mesh import DATA, MODEL, Axis, LayoutRule, Mesh, parse_layouts
from tfdist.config.sharding_options import Checkpoints, MeshOptions, ShardingOptions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.sharding.deferred import exchanging_what_is_read
from tfdist.strategies.base import StrategyMixin, agree_on_seed
from tfdist.strategies.connection import connecting, join_own_cluster, seed_from
from tfdist.strategies.devices import communication_for, prepare_devices
from tfdist.strategies.membership import Member


class MultiWorker(StrategyMixin, tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """Replicas in several processes, trained synchronously by TensorFlow's collectives.

    Must be created before any other TensorFlow operation of the process. `tfdist.strategy` creates
    it with a bounded start; this constructor waits for the other tasks as long as TensorFlow does.

    Args:
        cluster_resolver: the cluster and this task; by default read from TF_CONFIG.
        communication_options: `tf.distribute.experimental.CommunicationOptions`.
        cpu_devices: replicas in this process if there are no GPUs.
        rule: the treatment of gradients before the optimizer applies them.
        zero: ZeRO's stage, 0 to 3: the part of the model's state that is divided.
        mesh: the axes of the processes, such as "data=2,model=2"; by default all are data.
        layouts: the rules by which weights are divided along the model axis; by default those that
            follow from the kinds of layers.
        checkpoints: "sharded" if each process writes its part of a saved model, else "whole".

    Raises:
        ConfigError: if the mesh is not one of the processes.
    """

    name = "multi_worker"

    def __init__(
        self,
        cluster_resolver: object = None,
        communication_options: object = None,
        cpu_devices: int = 1,
        rule: GradientOptions = PLAIN,
        zero: int = 0,
        mesh: str | None = None,
        layouts: str | None = None,
        checkpoints: Checkpoints = "whole",
    ) -> None:
        self.rule, self.zero, self.checkpoints = rule, zero, checkpoints
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        extended = CollectiveExtended(self, cluster_resolver, options, cpu_devices)
        tf.distribute.Strategy.__init__(self, extended)
        self._world = self.shard
        if mesh is not None:
            self.lay_out(Mesh.parse(mesh), parse_layouts(layouts))
        replace_launchers(extended)
        agree_on_seed(self)

    @property
    def shard(self) -> batch_sharding.Shard:
        """This process's part of the data."""
        extended = self.extended
        return batch_sharding.Shard(
            workers=extended._num_workers,
            worker=extended._id_in_cluster,
            local=len(extended.worker_devices),
        )

    def lay_out(self, mesh: Mesh, layouts: Sequence[LayoutRule]) -> None:
        """See `StrategyMixin.lay_out`; a mesh cannot be changed any more.

        Raises:
            ConfigError: if the mesh is not one of the processes, is not the one that they have, or
                conflicts with the treatment of gradients.
        """
        _check_size(mesh, self._world.workers)
        axes = self._axes_of(mesh)
        if self.mesh is None:
            if not self.rule.is_plain or self._world.local > 1:
                raise ConfigError(
                    f"mesh='{mesh}' conflicts with options of gradient updates, or with several "
                    "devices in a process. Leave them out."
                )
            self.mesh = mesh
            self.extended.lay_out(axes, exchanging_what_is_read)
        elif _coordinates(axes) != _coordinates(self._axes_of(self.mesh)):
            raise ConfigError(
                f"mesh='{mesh}' conflicts with mesh='{self.mesh}', which the job has already. "
                "Leave one of them out."
            )
        self.layouts = tuple(layouts)

    def _axes_of(self, mesh: Mesh) -> list[Axis]:
        return [mesh.axis(name, self._world.worker) for name in (DATA, MODEL)]

    @property
    def world(self) -> batch_sharding.Shard:
        """This process among all of the mesh."""
        return self._world

    @property
    def parted(self) -> Axis | None:
        """The axis along which layers are divided, if it has several processes."""
        if not self.mesh or self.mesh.size(MODEL) == 1:
            return None
        return self.mesh.axis(MODEL, self._world.worker)

    def among_all(self) -> contextlib.AbstractContextManager[None]:
        """A block in which all processes of the mesh are replicas."""
        return self.extended.among_all() if self.mesh else contextlib.nullcontext()

    def link(self, axis: str = DATA) -> Link:
        """The processes along an axis. Must be called in a replica context."""
        return LineLink(self.extended.lines[axis]) if axis == MODEL else super().link()


def _coordinates(axes: list[Axis]) -> list[tuple[int, int]]:
    return [(axis.size, axis.index) for axis in axes]


def _check_size(mesh: Mesh, processes: int) -> None:
    if mesh.processes != processes:
        raise ConfigError(
            f"mesh='{mesh}' conflicts with a job of {processes} processes: its axes make "
            f"{mesh.processes}. Start as many (-n {mesh.processes}), or give sizes whose product "
            f"is {processes}."
        )


def resolver_for(cluster: ClusterSpec, task: Task, gpus: int) -> object:
    """TensorFlow's cluster resolver for a task of a cluster.

    Args:
        cluster: all tasks; only those that compute take part.
        task: this task.
        gpus: GPUs of each task.
    """
    tasks = {
        kind: names for kind, names in cluster.as_dict().items() if kind in ("chief", "worker")
    }
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(tasks),
        task_type=task.type,
        task_id=task.index,
        num_accelerators={"GPU": gpus},
        rpc_layer="grpc",
    )


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
