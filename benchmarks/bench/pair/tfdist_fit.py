"""tfdist: `model.fit`, under the strategy that `tfdist run` has entered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bench.pair.data import examples
from bench.pair.job import BATCH, Pair, Workload
from bench.pair.keras_models import LOSS, build, judge

__all__ = ["start"]


def start(job: Pair) -> Any:
    """Finds the strategy."""
    return _Process(tf.distribute.get_strategy())


class _Process:
    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.rank = strategy.shard.worker

    def exchange(self, count: int) -> Callable[[], Any]:
        """An all-reduce as a training loop by hand has it."""
        values = tf.zeros(count)

        def on_replica() -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

        return tf.function(lambda: self._strategy.run(on_replica))

    def train(self, workload: Workload, blocks: int, clock: Any) -> float:
        model, optimizer = build(workload)
        model.compile(optimizer, LOSS)
        timing = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: clock.start(),
            on_epoch_end=lambda epoch, logs: clock.stop(),
        )
        features, labels = examples(workload)
        model.fit(
            features,
            labels,
            batch_size=BATCH,
            epochs=blocks,
            shuffle=False,
            callbacks=[timing],
            verbose=0,
        )
        weights = [np.asarray(weight) for weight in model.get_weights()]
        return judge(workload, weights)

    def close(self) -> None:
        """`tfdist run` ends the job."""
