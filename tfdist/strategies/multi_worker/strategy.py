"""Several processes, on TensorFlow's own collectives."""

from __future__ import annotations

import tensorflow as tf

from tfdist._tf.distribute import CollectiveExtended
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.comm import batch_sharding
from tfdist.comm.launchers import launch_in_chunks
from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.strategies.base import StrategyMixin, agree_on_seed


class MultiWorker(StrategyMixin, tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """Replicas in several processes, trained synchronously by TensorFlow's collectives.

    Must be created before any other TensorFlow operation of the process. `tfdist.strategy` creates
    it with a bounded start; this constructor waits for the other tasks as long as TensorFlow does.

    Args:
        cluster_resolver: the cluster and this task; by default read from TF_CONFIG.
        communication_options: `tf.distribute.experimental.CommunicationOptions`.
        cpu_devices: replicas in this process if there are no GPUs.
        rule: the treatment of gradients before the optimizer applies them.
        zero: ZeRO's stage, 0 to 2: the part of the model's state that is divided.
    """

    name = "multi_worker"

    def __init__(
        self,
        cluster_resolver: object = None,
        communication_options: object = None,
        cpu_devices: int = 1,
        rule: GradientOptions = PLAIN,
        zero: int = 0,
    ) -> None:
        self.rule, self.zero = rule, zero
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        extended = CollectiveExtended(self, cluster_resolver, options, cpu_devices)
        tf.distribute.Strategy.__init__(self, extended)
        launch_in_chunks(extended)
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
