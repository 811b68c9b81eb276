"""tfdist: a convolutional network on scikit-learn's digits, trained until it reaches a loss."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bench.job import Job
from bench.measure import Meter
from bench.tfdist_servers import make_strategy, serve

__all__ = ["serve", "train"]

_TRAINING_EXAMPLES = 1300
_LEARNING_RATE = 0.1
_MOST_EPOCHS = 40


def train(job: Job, meter: Meter) -> dict[str, Any]:
    """Trains one epoch that changes nothing, for traces and pipelines, and then to `job.target`.

    The result has the curve: `clock`, `updates` and `losses`, a number for each epoch. The loss
    is that of the held-out examples, computed on the chief between epochs while the clock stands.
    """
    strategy = make_strategy(job)
    (features, labels), held_out = _digits()
    judge = _build()
    with strategy.scope():
        model = _build()
        optimizer = keras.optimizers.SGD(0.0)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    examples = tf.data.Dataset.from_tensor_slices((features, labels))
    curve = _Curve(job.target, meter, judge, held_out)
    history = model.fit(
        examples.repeat().batch(job.batch, drop_remainder=True).prefetch(4),
        epochs=1 + _MOST_EPOCHS,
        steps_per_epoch=job.steps,
        callbacks=[curve],
        verbose=0,
    )
    meter.stop()
    return {
        "iterations": int(optimizer.iterations.numpy()),
        "clock": curve.clock,
        "updates": curve.updates,
        "losses": curve.losses,
        "load": os.getloadavg()[0],
        **_counts(history.history, strategy),
    }


class _Curve(keras.callbacks.Callback):
    """Measures the loss at the end of each epoch and ends the training at the target."""

    def __init__(self, target: float, meter: Meter, judge: Any, held_out: Any) -> None:
        super().__init__()
        self.clock: list[float] = []
        self.updates: list[int] = []
        self.losses: list[float] = []
        self._target = target
        self._meter = meter
        self._judge = judge
        self._held_out = held_out
        self._began = 0.0
        self._warm_updates = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.optimizer.learning_rate.assign(_LEARNING_RATE)
            self._meter.start()
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        took = time.perf_counter() - self._began
        updates = int(self.model.optimizer.iterations.numpy())
        if epoch == 0:
            self._warm_updates, took = updates, 0.0
        self.clock.append((self.clock[-1] if self.clock else 0.0) + took)
        self.updates.append(updates - self._warm_updates)
        self.losses.append(self._loss())
        self.model.stop_training = self.losses[-1] <= self._target

    def _loss(self) -> float:
        self._judge.set_weights(self.model.get_weights())
        features, labels = self._held_out
        logits = self._judge(features, training=False)
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return float(np.mean(losses))


def _digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    path = pathlib.Path(__file__).parents[3] / "examples/digits.csv.gz"
    features, labels = np.split(np.loadtxt(path, delimiter=","), [64], axis=1)
    order = np.random.default_rng(1).permutation(len(features))
    features = (features[order] / 16).reshape(-1, 8, 8, 1).astype("float32")
    labels = labels[order, 0].astype("int32")
    cut = _TRAINING_EXAMPLES
    return (features[:cut], labels[:cut]), (features[cut:], labels[cut:])


def _build() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(48, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(96, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def _counts(history: dict[str, list[Any]], strategy: Any) -> dict[str, Any]:
    """What tfdist counted in all epochs but the first; empty lists where it counts nothing."""
    counted = strategy.epochs[1:] if "updates_per_second" in history else []
    histograms = [each.staleness for each in counted]
    steps = [list(each.steps.values()) for each in counted]
    width = max(map(len, histograms), default=0)
    padded = [[*each, *[0] * (width - len(each))] for each in histograms]
    return {
        "staleness": [int(sum(column)) for column in zip(*padded, strict=True)],
        "steps_by_worker": [int(sum(column)) for column in zip(*steps, strict=True)],
        "dropped": float(sum(history.get("gradients_dropped", [])[1:])),
        "dropped_by_epoch": [float(n) for n in history.get("gradients_dropped", [])[1:]],
    }
