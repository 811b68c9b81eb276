"""Metrics of a program's own: sums over the examples, statistics of batches, and other states."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.common import BATCH, scope
from tests.cases.loss_cases import sized
from tests.cases.statistic_cases import EXAMPLES, LAYERS
from tfdist.errors import EquivalenceWarning

ops = keras.ops


def _r2(y: Any, p: Any) -> Any:
    return 1 - ops.sum((y - p) ** 2) / ops.sum((y - ops.mean(y)) ** 2)


def _correlation(y: Any, p: Any) -> Any:
    y, p = y - ops.mean(y), p - ops.mean(p)
    return ops.sum(y * p) / ops.sqrt(ops.sum(y * y) * ops.sum(p * p))


def _ranks(y: Any, p: Any) -> Any:
    """For each example the share of the others that are below it, as its labels say."""
    right = ops.equal(p > ops.transpose(p), y > ops.transpose(y))
    return ops.mean(ops.cast(right, "float32"), 1)


class _Own(keras.metrics.Metric):
    """Metrics with states of their own, added up over batches."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.n = self.add_weight(initializer="zeros", name="n")
        self.total = self.add_weight(initializer="zeros", name="total")

    def result(self) -> Any:
        return self.total / self.n


class MeanOfBatches(_Own):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.n.assign_add(1.0)
        self.total.assign_add(ops.mean(ops.abs(y_true - y_pred)))


class CountsBatches(_Own):
    def __init__(self) -> None:
        super().__init__()
        self.batches = self.add_weight(initializer="zeros", name="batches", dtype="int32")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.batches.assign(self.batches + 1)
        self.n.assign_add(ops.cast(ops.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        return self.n / ops.cast(self.batches, "float32")


class MeanDeviation(_Own):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.std(y_pred))
        self.n.assign_add(1.0)


class Smoothed(_Own):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(ops.abs(y_true - y_pred)) + 0.5)
        self.n.assign_sub(-ops.cast(ops.size(y_true), "float32") - 1.0)


class Scores(keras.metrics.Metric):
    """Three results in a dictionary."""

    def __init__(self) -> None:
        super().__init__(name="scores")
        names = ("hits", "predicted", "true")
        self.states = [self.add_weight(initializer="zeros", name=name) for name in names]

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        p, y = ops.cast(y_pred > 0, "float32"), ops.cast(y_true > 0, "float32")
        for state, each in zip(self.states, (y * p, p, y), strict=True):
            state.assign_add(ops.sum(each))

    def result(self) -> dict[str, Any]:
        hits, predicted, true = (state + 1e-7 for state in self.states)
        return {
            "precision": hits / predicted,
            "recall": hits / true,
            "f1": 2 * hits / (predicted + true),
        }


class OfFunction(_Own):
    """Adds what a compiled function makes of Python's, NumPy's and TensorFlow's numbers."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        total, count = self.sums(y_pred, np.float32(2.0), power=2)
        self.total.assign_add(total)
        self.n.assign_add(count)

    @tf.function
    def sums(self, values: Any, factor: Any, power: int) -> Any:
        assert tf.is_tensor(factor), factor
        return factor * tf.reduce_sum(values**power), tf.cast(tf.shape(values)[0], tf.float32)


class Distinct(_Own):
    """Counts the different roundings of a batch's predictions."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        found, _ = tf.unique(tf.round(8.0 * y_pred[:, 0]))
        self.total.assign_add(tf.cast(tf.size(found), tf.float32))
        self.n.assign_add(1.0)


class ByNumPy(_Own):
    """Adds a number that NumPy computes from a batch's predictions."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        mean = tf.numpy_function(np.mean, [y_pred], tf.float32)
        self.total.assign_add(tf.ensure_shape(mean, ()))
        self.n.assign_add(1.0)


class CountsElements(_Own):
    """Counts by a constant of the program's, which tfdist cannot tell from a number of examples."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.n.assign_add(64.0)
        self.total.assign_add(ops.sum(y_true))


class Largest(keras.metrics.Metric):
    """The largest error so far: its states are no sums."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Takes a batch."""
        del sample_weight
        error = ops.max(ops.abs(ops.cast(y_true, "float32") - y_pred))
        self.largest.assign(ops.maximum(self.largest, error))

    def result(self) -> Any:
        """The largest."""
        return self.largest.value


class Running(keras.metrics.Metric):
    """The variance of predictions by the means of the batches so far (Chan et al. 1979).

    Args:
        plain: whether its states are TensorFlow's variables.
    """

    def __init__(self, plain: bool = False) -> None:
        super().__init__(name="running")
        self.count, self.mean, self.squares = (
            tf.Variable(0.0) if plain else self.add_weight(name=name, initializer="zeros")
            for name in ("count", "mean", "squares")
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Takes a batch."""
        size = ops.cast(ops.size(y_pred), "float32")
        apart, total = ops.mean(y_pred) - self.mean, self.count + size
        own = ops.sum(ops.square(y_pred - ops.mean(y_pred)))
        self.squares.assign(self.squares + own + apart**2 * self.count * size / total)
        self.mean.assign(self.mean + apart * size / total)
        self.count.assign(total)

    def result(self) -> Any:
        """The variance."""
        return self.squares / self.count

    def reset_state(self) -> None:
        """Forgets all batches."""
        for state in (self.count, self.mean, self.squares):
            state.assign(0.0)


class ByTable(_Own):
    """Weighs predictions by numbers of a variable that nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tf.Variable([2.0])

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(y_pred * self.table))
        self.n.assign_add(ops.cast(ops.size(y_pred), "float32"))


class MeanOf(keras.metrics.Mean):
    """The mean over the batches of a function of the predictions."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__(name="of_batches")
        self.function = function

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(self.function(y_pred))


def _guarded(p: Any) -> Any:
    """A mean unless one is no number, and whether some are large, and all not small."""
    mean = tf.where(tf.reduce_any(tf.math.is_nan(p)), 0.0, tf.reduce_mean(p))
    largest = tf.cast(tf.reduce_any(p > 0.9), "float32")
    return mean + largest + 2.0 * tf.cast(tf.reduce_all(p > -1.0), "float32")


#: Metrics whose constants cannot be told from a number of examples.
CONSTANTS: dict[str, Callable[[], Any]] = {
    "smoothed": Smoothed,
    "elements": CountsElements,
    "keras": keras.metrics.R2Score,
    "batches": MeanOfBatches,
}
#: Metrics that add what hides how it depends on the examples, with a part of the warning.
HIDDEN: dict[str, tuple[Callable[[], Any], str]] = {
    "distinct": (Distinct, "is added what Size computes from the examples"),
    "numpy": (ByNumPy, "is added what PyFunc computes from the examples"),
    "median": (
        lambda: MeanOf(ops.median),
        "A value of the metric 'of_batches' is reduced to a number by Ceil",
    ),
}

METRICS: dict[str, Callable[[], Any]] = {
    "r2": lambda: _r2,
    "correlation": lambda: _correlation,
    "ranks": lambda: _ranks,
    "maximum": lambda: lambda y, p: ops.max(ops.abs(y - p)),
    "mean of batches": MeanOfBatches,
    "counts batches": CountsBatches,
    "deviations": MeanDeviation,
    "smoothed": Smoothed,
    "dictionary": Scores,
    "of a function": OfFunction,
    "plain variables": lambda: Running(plain=True),
    "by a table": ByTable,
    "elements": CountsElements,
    "guarded": lambda: MeanOf(_guarded),
}


class ByHand(keras.Sequential):
    """A step that updates its metrics by hand, and returns all of their results."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean((y - predicted) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.own.update_state(y, predicted)
        return {"loss": loss, "own": self.own.result()}


class Kept(keras.callbacks.Callback):
    """Keeps the logs of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(common.numbers(logs))


def metric(
    strategy: Any, *, kind: str, batches: bool = False, where: str = "compile", even: bool = False
) -> dict[str, Any]:
    """A metric of a program's own.

    Args:
        strategy: what to train on.
        kind: one of `METRICS`.
        batches: whether a callback reads the logs of batches.
        where: "compile", or "step" for a `train_step` written by hand.
        even: whether all batches have one size, which is known when a step is traced.
    """
    x, _ = common.table(64 if even else EXAMPLES)
    y = np.tanh(0.4 * x.sum(1, keepdims=True) + 0.3).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=even)
    kept = Kept()
    with scope(strategy):
        by_hand = where == "step"
        model = (ByHand if by_hand else keras.Sequential)(
            [keras.Input((8,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)]
        )
        own = METRICS[kind]()
        if by_hand:
            model.own = own
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=None if by_hand else [own])
        done = model.fit(data, epochs=2, verbose=0, callbacks=[kept] if batches else None)
        score = {} if by_hand else model.evaluate(data, verbose=0, return_dict=True)
    report = {"history": common.history(done), "evaluate": common.numbers(score)}
    return {**report, "logs": kept.logs}


def named(
    strategy: Any,
    *,
    kind: str,
    options: dict[str, Any],
    batch: int = BATCH,
    needs_size: bool = False,
) -> list[str]:
    """The warnings of a fit.

    Args:
        strategy: what to train on.
        kind: a metric of `CONSTANTS` or `HIDDEN`, a layer of `LAYERS`, or "" for Keras's own alone.
        options: of `compile`.
        batch: examples in a batch.
        needs_size: whether the loss needs their number when it is traced.
    """
    x, y = common.table(2 * batch)
    data = tf.data.Dataset.from_tensor_slices((x, y[:, None].astype("float32")))
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layers = [LAYERS[kind]()] if kind in LAYERS else []
        made = {**CONSTANTS, **{name: metric for name, (metric, _) in HIDDEN.items()}}
        metrics = [made[kind]()] if kind in made else ["mae"]
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(6), *layers, keras.layers.Dense(1)]
        )
        loss = sized(keras.losses.mean_squared_error) if needs_size else "mse"
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=metrics, **options)
        model.fit(data.batch(batch, drop_remainder=True), verbose=0)
    return [str(each.message) for each in caught if issubclass(each.category, EquivalenceWarning)]


def largest(strategy: Any, *, running: bool = False) -> list[str]:
    """The warnings of a fit with a metric that is a maximum, or a running variance."""
    x, _ = common.table(EXAMPLES)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = Running() if running else Largest()
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae", "accuracy", keras.metrics.R2Score(), own])
        model.fit(x, x[:, :1], BATCH, 1, verbose=0)
    return [str(w.message) for w in caught if "metric's variable" in str(w.message)]


def evaluated(strategy: Any) -> list[float]:
    """What many small batches of an evaluation make of a metric of TensorFlow's variables."""
    x, _ = common.table(EXAMPLES)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Running(plain=True)])
        model.fit(x, x[:, :1], BATCH, verbose=0)
        return [model.evaluate(x, x[:, :1], 2, verbose=0)[1] for _ in range(3)]
