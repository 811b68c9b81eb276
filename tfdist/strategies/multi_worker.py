"""Several processes, on TensorFlow's own collectives."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import data
from tfdist._tensorflow import CollectiveExtended
from tfdist.strategies.base import StrategyMixin


class MultiWorker(StrategyMixin, tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """Replicas in several processes, trained synchronously by TensorFlow's collectives.

    Must be created before any other TensorFlow operation of the process.
    """

    name = "multi_worker"

    def __init__(self, cluster_resolver: Any = None, communication_options: Any = None) -> None:
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        extended = CollectiveExtended(self, cluster_resolver, options)
        tf.distribute.Strategy.__init__(self, extended)

    @property
    def shard(self) -> data.Shard:
        """This process's part of the data."""
        extended = self.extended
        return data.Shard(
            workers=extended._num_workers,
            worker=extended._id_in_cluster,
            local=len(extended.worker_devices),
        )
