"""Trainings that are left at a step and taken up by another `fit`, within one process."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.comm import host_collectives
from tfdist.errors import ConfigError
from tfdist.keras import elastic
from tfdist.launcher.elastic_directory import ElasticDirectory


class _Leave(Exception):
    """Ends a training as the loss of a peer does."""


class _LeaveAt(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self._at = (epoch, batch)
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self._epoch, batch) == self._at:
            raise _Leave


def _data(kind: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(70, 4)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    if kind in ("arrays", *OWN):
        return {"x": x, "y": y, "batch_size": 16, "shuffle": True}
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(70, seed=4).batch(16)
    if kind == "unknown":
        return {"x": dataset.filter(lambda *_: True)}
    if kind == "endless":
        return {"x": dataset.repeat(), "steps_per_epoch": 4}
    if kind == "generator":
        return {"x": _Sequence(x, y)}
    return {"x": dataset}


class _Sequence(keras.utils.PyDataset):  # type: ignore[misc]
    """Shuffles by itself after each epoch."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self._x, self._y = x, y
        self._rng = np.random.default_rng(1)
        self._order = np.arange(len(x))

    def __len__(self) -> int:
        return -(-len(self._x) // 16)

    def __getitem__(self, index: int) -> Any:
        rows = self._order[16 * index : 16 * index + 16]
        return self._x[rows], self._y[rows]

    def on_epoch_end(self) -> None:
        self._rng.shuffle(self._order)


class OwnUpdates(keras.Sequential):  # type: ignore[misc]
    """Does not use the optimizer that it is compiled with."""

    def prepare(self, kind: str) -> None:
        """Makes what a step of the kind needs."""
        self.shown = keras.metrics.Mean(name="mean")
        if kind == "optimizers":
            self.several = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9)]
            self.update = self._by_optimizers
        elif kind == "by hand":
            self.update = self._by_hand
        elif kind == "hidden optimizer":
            adam = keras.optimizers.Adam(0.01, name="hidden")
            self.update = lambda grads, weights: adam.apply(grads, weights)
        else:
            self.several = [keras.optimizers.Adam(0.01)]
            beside = [keras.Variable(1.0, name="beside")]
            self.update = lambda grads, weights: self.several[0].apply(
                [*grads, tf.reduce_mean(grads[0])], [*weights, beside[0]]
            )

    def _by_optimizers(self, gradients: Any, weights: Any) -> None:
        """A kernel and its bias have different ones."""
        for i, optimizer in enumerate(self.several):
            optimizer.apply(gradients[i::2], weights[i::2])

    def _by_hand(self, gradients: Any, weights: Any) -> None:
        for gradient, weight in zip(gradients, weights, strict=True):
            weight.assign_sub(0.05 * gradient)

    def train_step(self, data: Any) -> dict[str, Any]:
        """One step."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.update(tape.gradient(loss, weights), weights)
        self.shown.update_state(loss)
        return {"loss": self.shown.result()}


class _Seen(keras.callbacks.Callback):
    """Keeps the epochs that were begun, and where each ended."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: set[int] = set()
        self.ends: dict[int, tuple[int, frozenset[int]]] = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self.epochs.add(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Notes the epochs so far."""
        self.ends[epoch] = (epoch, frozenset(self.epochs))


#: Trainings whose step is the program's own.
OWN = ("optimizers", "by hand", "hidden optimizer", "hidden variable")


def _listed(seen: _Seen) -> list[list[int]]:
    ends = [[epoch, *sorted(epochs)] for epoch, epochs in seen.ends.values()]
    return [sorted(seen.epochs), *ends]


def _fit(kind: str, callbacks: list[Any], deferred: bool) -> list[Any]:
    keras.utils.set_random_seed(3)
    first = [] if deferred else [keras.Input([4])]
    model = (OwnUpdates if kind in OWN else keras.Sequential)(
        [*first, keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    )
    if kind in OWN:
        model.prepare(kind)
        model.compile(loss="mse")
    else:
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=0.01)
    # The first epoch has the highest loss, so its weights are long gone when they are put back.
    worst = keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)
    last: list[Any] = []
    seen = _Seen()
    note = keras.callbacks.LambdaCallback(on_train_end=lambda _: last.extend(model.get_weights()))
    warm = model.fit(np.ones((16, 4)), np.ones((16, 1)), epochs=1, verbose=0)
    history = model.fit(
        **_data(kind), epochs=4, verbose=0, callbacks=[stop, note, worst, seen, *callbacks]
    )
    weights = [weight.numpy() for weight in model.weights]
    logs = [*warm.history.values(), *history.history.values()]
    return [*last, *weights, *logs, history.epoch, [stop.wait, stop.best], *_listed(seen)]


def undisturbed(strategy: Any, *, kind: str, deferred: bool) -> list[Any]:
    """The results of a training that nobody leaves."""
    with strategy.scope():
        return _fit(kind, [], deferred)


def left_and_taken_up(
    strategy: Any, *, path: str, kind: str, at: tuple[int, int], deferred: bool = False
) -> list[Any]:
    """The results of a training that was left at a step."""
    with strategy.scope():
        place = ElasticDirectory(pathlib.Path(path) / f"{kind}-{at[0]}-{at[1]}")
        place.begin()
        try:
            elastic.begin(place)
            _leave_at(at, kind, deferred)
            host_collectives.barrier(strategy, "the state is there")
            elastic.begin(place)
            return _fit(kind, [], deferred)
        finally:
            elastic.end()


def _leave_at(at: tuple[int, int], kind: str, deferred: bool) -> None:
    """Trains up to a step, with a copy of the state after each, and leaves the last one."""
    elastic.PERIOD_SECONDS, before = 0.0, elastic.PERIOD_SECONDS
    try:
        _fit(kind, [_LeaveAt(*at)], deferred)
    except _Leave:
        elastic.leave_state()
    finally:
        elastic.PERIOD_SECONDS = before


def refused(strategy: Any, *, path: str, kind: str) -> str:
    """What is said of a training whose state cannot be kept."""
    with strategy.scope():
        elastic.begin(ElasticDirectory(pathlib.Path(path) / kind))
        try:
            _fit(kind, [], deferred=False)
        except ConfigError as error:
            return str(error)
        finally:
            elastic.end()
    return ""
