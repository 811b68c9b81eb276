"""Several processes, on TensorFlow's own collectives."""

from __future__ import annotations

import secrets
from typing import Any

import keras
import tensorflow as tf

from tfdist import agreement, data
from tfdist._tensorflow import CollectiveExtended, global_seed
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.strategies.base import StrategyMixin


class MultiWorker(StrategyMixin, tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """Replicas in several processes, trained synchronously by TensorFlow's collectives.

    Must be created before any other TensorFlow operation of the process. `tfdist.strategy` creates
    it with a bounded start; this constructor waits for the other tasks as long as TensorFlow does.

    Args:
        cluster_resolver: the cluster and this task; by default read from TF_CONFIG.
        communication_options: `tf.distribute.experimental.CommunicationOptions`.
        cpu_devices: replicas in this process where there are no GPUs.
    """

    name = "multi_worker"

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        cpu_devices: int = 1,
    ) -> None:
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        extended = CollectiveExtended(self, cluster_resolver, options, cpu_devices)
        tf.distribute.Strategy.__init__(self, extended)
        self._agree_on_seed()

    @property
    def shard(self) -> data.Shard:
        """This process's part of the data."""
        extended = self.extended
        return data.Shard(
            workers=extended._num_workers,
            worker=extended._id_in_cluster,
            local=len(extended.worker_devices),
        )

    def _agree_on_seed(self) -> None:
        """Gives all workers the chief's seed, so that they shuffle alike.

        A seed that the program has set already is kept.
        """
        own = global_seed()
        seeds = agreement.all_gather_json(self, own, "the seeds at the start")
        if any(seed is None for seed in seeds):
            drawn = secrets.randbelow(2**32)
            keras.utils.set_random_seed(agreement.from_chief(self, drawn, "the chief's seed"))


def resolver_for(cluster: ClusterSpec, task: Task, gpus: int) -> Any:
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
