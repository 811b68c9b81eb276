"""What a program's own step gives to a model, a loss, a metric, to its logs, and as predictions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.common import scope
from tfdist.errors import EquivalenceWarning

EXAMPLES = 77
CLASSES = 3


def _attacked(model: Any, x: Any, y: Any) -> Any:
    """Moves examples along a gradient that the whole batch's norm divides."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
        loss = tf.reduce_mean(loss)
    gradient = tape.gradient(loss, x)
    return x + 0.1 * gradient / (tf.norm(gradient) + 1e-9)


def _hard(model: Any, x: Any, y: Any) -> Any:
    """Whether each example's loss is above the mean."""
    each = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
    return each > tf.reduce_mean(each)


def _chosen(model: Any, x: Any, y: Any) -> tuple[Any, ...]:
    keep = _hard(model, x, y)
    return tf.boolean_mask(x, keep), tf.boolean_mask(y, keep)


def _in_python(x: Any) -> Any:
    return tf.ensure_shape(tf.numpy_function(lambda a: a - a.mean(0), [x], tf.float32), [None, 8])


#: From a model, inputs and labels, the arguments of a loss and of the model that a step gives them.
GIVEN: dict[str, Callable[..., tuple[Any, ...]]] = {
    "inputs": lambda model, x, y: ((x - tf.reduce_mean(x, 0)) / tf.math.reduce_std(x, 0), y),
    "largest": lambda model, x, y: (x / tf.reduce_max(tf.abs(x)), y),
    "attacked": lambda model, x, y: (_attacked(model, x, y), y),
    "labels": lambda model, x, y: (x, tf.cast(y > tf.reduce_min(y), tf.int32)),
    "weights": lambda model, x, y: (x, y, (w := tf.exp(x[:, 0])) / tf.reduce_mean(w)),
    "hard": lambda model, x, y: (x, y, tf.cast(_hard(model, x, y), tf.float32)),
    "chosen": _chosen,
    "counted": lambda model, x, y: (x / tf.cast(tf.shape(x)[0], tf.float32), y),
    "python": lambda model, x, y: (_in_python(x), y),
}

#: The same, but each example's values come from that example.
GIVEN_APART: dict[str, Callable[..., tuple[Any, ...]]] = {
    "inputs": lambda model, x, y: (x - tf.reduce_mean(x, 1, keepdims=True), y),
    "labels": lambda model, x, y: (
        x,
        tf.argmax(model(x) + 0.5 * tf.one_hot(y, CLASSES), -1),
        tf.cast(tf.range(tf.shape(y)[0]) >= 0, tf.float32),
    ),
    "chosen": lambda model, x, y: (tf.boolean_mask(x, x[:, 0] > 0), y[x[:, 0] > 0]),
    "twice": lambda model, x, y: (tf.concat([x, -x], 0), tf.concat([y, y], 0)),
    "as long as the longest": lambda model, x, y: (
        x * tf.pad(tf.sequence_mask(y + 5, dtype=tf.float32), [[0, 0], [0, 8]])[:, :8],
        y,
    ),
}


class Given(keras.Model):
    """A step that changes the batch before the model and the loss are given it."""

    def __init__(self, change: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__()
        self.change = change
        self.net = keras.Sequential([keras.layers.Dense(6, "tanh"), keras.layers.Dense(CLASSES)])

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *weights = self.change(self, *data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), *weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def given(strategy: Any, *, kind: str, apart: bool = False) -> dict[str, Any]:
    """A step that changes what it gives to the model and the loss, and what is said of it."""
    x, y = common.table(EXAMPLES)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Given((GIVEN_APART if apart else GIVEN)[kind])
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        report = common.fitted(model, x, y)
    texts = [str(each.message) for each in caught]
    return {**report, "named": any("meet in the values that the step computes" in t for t in texts)}


#: From a step's labels and predictions, the arguments of a metric's `update_state`.
UPDATES: dict[str, tuple[str, Callable[[Any, Any], tuple[Any, ...]]]] = {
    "deviation": ("mean", lambda y, p: (tf.math.reduce_std(p),)),
    "centred": ("error", lambda y, p: (y - tf.reduce_mean(y), p - tf.reduce_mean(p))),
    "skewness": ("mean", lambda y, p: ((p - tf.reduce_mean(p)) ** 3 / tf.math.reduce_std(p) ** 3,)),
    "covariance": (
        "sum",
        lambda y, p: (tf.reduce_sum((y - tf.reduce_mean(y)) * (p - tf.reduce_mean(p))),),
    ),
    "count": ("sum", lambda y, p: (tf.shape(p)[0],)),
    "steps": ("sum", lambda y, p: (1,)),
    "weighted": ("mean", lambda y, p: (p, tf.nn.softmax(y, 0))),
}

#: From labels and predictions a number for the logs.
LOGGED: dict[str, Callable[[Any, Any], Any]] = {
    "deviation": lambda y, p: tf.math.reduce_std(p),
    "covariance": lambda y, p: tf.reduce_sum((y - tf.reduce_mean(y)) * (p - tf.reduce_mean(p))),
    "root": lambda y, p: tf.sqrt(tf.reduce_mean((y - p) ** 2)),
    "share": lambda y, p: tf.reduce_sum(tf.abs(p)) / tf.reduce_sum(tf.abs(y)),
}

#: From labels and predictions, and the gradient of a kernel, tensors for the logs.
TENSORS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "means": lambda y, p, g: tf.reduce_mean(p, 0),
    "deviations": lambda y, p, g: tf.math.reduce_std(p, 0),
    "shares": lambda y, p, g: tf.reduce_sum(tf.nn.relu(p), 0) / tf.reduce_sum(tf.abs(p), 0),
    "norms": lambda y, p, g: tf.norm(g, axis=0),
    "counts": lambda y, p, g: tf.math.confusion_matrix(y[:, 0] > 0.5, p[:, 0] > 0.5, 2),
    "rows": lambda y, p, g: tf.square(y - p)[:, 0],
}
#: One that holds numbers of some examples.
FIRST: dict[str, Callable[[Any, Any, Any], Any]] = {"first": lambda y, p, g: p[0]}

#: From predictions other ones.
PREDICTED: dict[str, Callable[[Any], Any]] = {
    "ranks": lambda p: tf.argsort(tf.argsort(p[:, 0])),
    "shares": lambda p: tf.nn.softmax(p, 0),
    "centred": lambda p: p - tf.reduce_mean(p, 0),
    "by row": lambda p: {"best": tf.argmax(p, -1), "p": tf.nn.softmax(p)},
}


class Stepping(keras.Sequential):
    """A step by hand, whose logs come from `_report`."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.compute_loss(x, y, p)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss, **self._report(y, p, gradients[0])}

    def _report(self, y: Any, p: Any, gradient: Any = None) -> dict[str, Any]:
        raise NotImplementedError


class Reporting(Stepping):
    """Updates a metric by hand, logs a number, and changes what it predicts."""

    update, logged, predicted = "", "", ""

    def keep(self) -> Reporting:
        """Makes the metrics."""
        self.kept = {
            "mean": keras.metrics.Mean(name="mean"),
            "sum": keras.metrics.Sum(name="sum"),
            "error": keras.metrics.MeanAbsoluteError(name="error"),
        }
        return self

    @property
    def metrics(self) -> list[Any]:
        return [*super().metrics, *self.kept.values()]

    def _report(self, y: Any, p: Any, gradient: Any = None) -> dict[str, Any]:
        del gradient
        logs = {}
        if self.update:
            name, arguments = UPDATES[self.update]
            self.kept[name].update_state(*arguments(y, p))
            logs[name] = self.kept[name].result()
        if self.logged:
            logs["logged"] = LOGGED[self.logged](y, p)
        return logs

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return self._report(y, self(x, training=False))

    def predict_step(self, data: Any) -> Any:
        p = self(data[0] if isinstance(data, tuple) else data, training=False)
        return PREDICTED[self.predicted](p) if self.predicted else p


def reported(
    strategy: Any, *, even: bool, update: str = "", logged: str = "", predicted: str = ""
) -> dict[str, Any]:
    """Metrics, logs and predictions of a model of the program's own, and what is said of it.

    Args:
        strategy: what to train on.
        even: whether all batches have one size, which is known when a step is traced.
        update: one of `UPDATES`.
        logged: one of `LOGGED`.
        predicted: one of `PREDICTED`; nothing is trained then.
    """
    x, _ = common.table(64 if even else EXAMPLES)
    y = np.tanh(x @ np.ones((8, 2), "float32") * 0.3 + 0.2).astype("float32")
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(2)]
        model = Reporting([keras.Input((8,)), *layers]).keep()
        model.update, model.logged, model.predicted = update, logged, predicted
        model.compile(keras.optimizers.SGD(0.05), "mse")
        if predicted:
            made = model.predict(x, batch_size=16, verbose=0)
            report: dict[str, Any] = made if isinstance(made, dict) else {"predicted": made}
        else:
            report = common.fitted(model, x, y)
            report["evaluate"] = model.evaluate(x, y, 16, verbose=0, return_dict=True)
    texts = [str(each.message) for each in caught]
    return {**report, "named": [t.partition(" (at")[0] for t in texts if "of a batch" in t]}


class Logging(Stepping):
    """Logs tensors."""

    tensors: dict[str, Callable[[Any, Any, Any], Any]]

    def _report(self, y: Any, p: Any, gradient: Any = None) -> dict[str, Any]:
        return {name: made(y, p, gradient) for name, made in self.tensors.items()}


class _Tensors(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append({name: np.asarray(value) for name, value in logs.items()})


def tensors(strategy: Any, *, first: bool) -> dict[str, Any]:
    """The tensors that a step of the program's own logs, and what is said of them."""
    x, _ = common.table(EXAMPLES)
    y = np.tanh(x @ np.ones((8, 2), "float32") * 0.3 + 0.2).astype("float32")
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Logging([keras.Input((8,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(2)])
        model.tensors = FIRST if first else TENSORS
        model.compile(keras.optimizers.SGD(0.05), "mse")
        kept = _Tensors()
        model.fit(x, y, 16, 1, 0, [kept], shuffle=False)
    named = {str(each.message) for each in caught if each.category is EquivalenceWarning}
    return {"seen": kept.seen, "named": sorted(named)}


class _Sparse(keras.regularizers.Regularizer):
    """The divergence of mean activities from a small one, as in sparse autoencoders."""

    def __call__(self, x: Any) -> Any:
        mean = keras.ops.mean(keras.ops.sigmoid(x), 0)
        return -0.1 * keras.ops.sum(0.05 * keras.ops.log(mean) + 0.95 * keras.ops.log(1 - mean))


#: Activity regularizers, which Keras divides by the size of the batch.
ACTIVITIES: dict[str, Callable[[], Any]] = {
    "l2": lambda: keras.regularizers.L2(0.05),
    "root": lambda: lambda x: 0.1 * keras.ops.sqrt(keras.ops.sum(keras.ops.square(x))),
    "sparse": _Sparse,
    "deviation": lambda: lambda x: 0.1 * keras.ops.mean(keras.ops.std(x, 0)),
}


def active(strategy: Any, *, kind: str, even: bool, layer: bool = False) -> dict[str, Any]:
    """An activity regularizer, or Keras's layer that has one, and what is said of it."""
    x, y = common.table(64 if even else EXAMPLES)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hidden = keras.layers.Dense(6, activity_regularizer=None if layer else ACTIVITIES[kind]())
        more = [keras.layers.ActivityRegularization(l1=0.01, l2=0.05)] if layer else []
        model = keras.Sequential([keras.Input((8,)), hidden, *more, keras.layers.Dense(CLASSES)])
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        report = common.fitted(model, x, y)
    return {**report, "named": any("meet in the loss" in str(each.message) for each in caught)}
