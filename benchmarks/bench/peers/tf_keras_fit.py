"""tf_keras's own parameter-server training: `model.fit` on a `DatasetCreator`."""

from __future__ import annotations

from typing import Any

import tf_keras

from bench.data import build_model, make_dataset
from bench.job import Job
from bench.measure import Meter
from bench.stock import make_strategy, serve

__all__ = ["serve", "train"]


class _Timing(tf_keras.callbacks.Callback):
    """Times the second epoch. `fit` joins the coordinator before an epoch ends."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self._meter.start()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self._meter.stop()


def train(job: Job, meter: Meter) -> dict[str, float]:
    """Trains two epochs of `job.steps` steps."""
    strategy = make_strategy()
    with strategy.scope():
        model, optimizer = build_model(job, tf_keras)
        model.compile(
            optimizer,
            tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=job.steps_per_execution,
        )
    history = model.fit(
        tf_keras.utils.experimental.DatasetCreator(lambda context: make_dataset(job)),
        epochs=2,
        steps_per_epoch=job.steps,
        callbacks=[_Timing(meter)],
        verbose=0,
    )
    return {
        "iterations": int(optimizer.iterations.numpy()),
        "accuracy": float(history.history["accuracy"][-1]),
    }
