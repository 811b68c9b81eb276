"""Several processes, on TensorFlow's own collectives."""

from __future__ import annotations

import tensorflow as tf

from tfdist._tf.distribute import CollectiveExtended
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.comm.launchers import replace_launchers
from tfdist.comm.replica_collectives import LineLink, Link
from tfdist.config.collective_options import CollectiveOptions
from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.config.mesh import DATA, MODEL
from tfdist.config.sharding_options import Checkpoints, MeshOptions, ShardingOptions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.strategies.base import agree_on_seed
from tfdist.strategies.connection import await_chief, connecting, join_own_cluster, seed_from
from tfdist.strategies.devices import communication_for, prepare_devices
from tfdist.strategies.membership import Member
from tfdist.strategies.meshed import Meshed


class MultiWorker(Meshed, tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
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
        self.arrange(mesh, layouts)
        replace_launchers(extended)
        agree_on_seed(self)

    def link(self, axis: str = DATA) -> Link:
        """The processes along an axis. Must be called in a replica context."""
        return LineLink(self.extended.lines[axis]) if axis == MODEL else super().link()


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
    implementation = communication_for(gpus, config.part(CollectiveOptions).communication)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation[implementation]
    )
    mesh, sharding = config.part(MeshOptions), config.part(ShardingOptions)
    with connecting(member, config):
        await_chief(member)
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
