"""A hand-written loop for `tf.distribute`, with a Keras 3 model, on whichever strategy there is.

https://www.tensorflow.org/tutorials/distribute/custom_training
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from bench.pair import fit
from bench.pair.data import batches
from bench.pair.job import BATCH, Pair, Workload
from bench.pair.keras_models import build, judge

__all__ = ["start"]


def start(job: Pair) -> Any:
    """Finds the strategy, or makes TensorFlow's own."""
    return _Process(fit.start(job), job.processes)


class _Process:
    def __init__(self, of_fit: Any, processes: int) -> None:
        self._strategy, self._processes = of_fit.strategy, processes
        self.rank, self.exchange, self.close = of_fit.rank, of_fit.exchange, of_fit.close

    def train(self, workload: Workload, blocks: int, clock: Any) -> float:
        with self._strategy.scope():
            model, optimizer = build(workload)
            optimizer.build(model.trainable_variables)
        lossfn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def on_replica(features: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                losses = lossfn(labels, model(features, training=True))
                loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        @tf.function
        def step(features: Any, labels: Any) -> Any:
            losses = self._strategy.run(on_replica, args=(features, labels))
            return self._strategy.reduce("SUM", losses, axis=None)

        numbers = iter(self._strategy.distribute_datasets_from_function(self._shares(workload)))
        for _ in range(blocks):
            clock.start()
            for _ in range(workload.steps):
                step(*next(numbers))
            clock.stop()
        return judge(workload, model.get_weights())

    def _shares(self, workload: Workload) -> Any:
        share = batches(workload, self.rank, self._processes)
        data = tf.data.Dataset.from_tensor_slices(share).repeat()
        data = data.batch(BATCH // self._processes, drop_remainder=True).prefetch(2)
        return lambda context: data
