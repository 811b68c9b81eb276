"""`model.fit`: of Keras 3 alone or under the strategy of `tfdist run`, and of tf_keras."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from bench.pair.data import batches, examples
from bench.pair.job import BATCH, Pair, Workload
from bench.pair.keras_models import build, judge, loss_of
from bench.pair.peers import PEERS
from tfdist import environment

__all__ = ["start"]


def start(job: Pair) -> Any:
    """Finds the strategy, or makes TensorFlow's own."""
    if PEERS[job.peer].own_strategy:
        return _Process(job, tf.distribute.MultiWorkerMirroredStrategy(), _own_rank())
    strategy = tf.distribute.get_strategy()
    shard = getattr(strategy, "shard", None)
    return _Process(job, strategy, 0 if shard is None else shard.worker)


def _own_rank() -> int:
    cluster = environment.read("TF_CONFIG")
    return int(json.loads(cluster)["task"]["index"]) if cluster else 0


class _Process:
    def __init__(self, job: Pair, strategy: Any, rank: int) -> None:
        self.strategy, self._processes, self.rank = strategy, job.processes, rank
        self._own = PEERS[job.peer].own_strategy
        self._library = importlib.import_module("tf_keras" if self._own else "keras")

    def exchange(self, count: int) -> Callable[[], Any]:
        """An all-reduce as a training loop by hand has it."""
        values = tf.zeros(count)

        def on_replica() -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

        return tf.function(lambda: self.strategy.run(on_replica))

    def train(self, workload: Workload, blocks: int, clock: Any) -> float:
        with self.strategy.scope():
            model, optimizer = build(workload, self._library)
            model.compile(optimizer, loss_of(self._library))
        timing = self._library.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: clock.start(),
            on_epoch_end=lambda epoch, logs: clock.stop(),
        )
        said = {"epochs": blocks, "shuffle": False, "callbacks": [timing], "verbose": 0}
        if self._own:
            model.fit(self._shares(workload), steps_per_epoch=workload.steps, **said)
        else:
            features, labels = examples(workload)
            model.fit(features, labels, batch_size=BATCH, **said)
        weights = [np.asarray(weight) for weight in model.get_weights()]
        return judge(workload, weights)

    def _shares(self, workload: Workload) -> Any:
        """This process's share of each batch, as TensorFlow's guide to several workers has it."""

        def share(context: Any) -> Any:
            data = tf.data.Dataset.from_tensor_slices(batches(workload, self.rank, self._processes))
            return data.repeat().batch(BATCH // self._processes, drop_remainder=True).prefetch(2)

        return self.strategy.distribute_datasets_from_function(share)

    def close(self) -> None:
        """The launcher ends the job."""
