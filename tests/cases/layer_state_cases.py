"""Layers of a program's own that keep something between batches, in a pipeline's microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.cases.pipeline_cases import pipeline

FEATURES = 5


class Keeping(layers.Layer):
    """Keeps what a function makes of the value of before and the batch.

    Args:
        follow: the new value.
        read: what the layer returns; by default its input.
        dtype_of_state: of the kept value.
        wide: whether that has an element for each feature.
        plain: whether it is a variable of TensorFlow's own.
        always: whether it does so in each call, and not in training alone.
        memory: rows of examples that it keeps instead.
    """

    def __init__(
        self,
        follow: Callable[[Any, Any], Any],
        read: Callable[[Any, Any], Any] | None = None,
        dtype_of_state: str = "float32",
        *,
        wide: bool = False,
        plain: bool = False,
        always: bool = False,
        memory: int = 0,
    ) -> None:
        super().__init__()
        self.follow, self.reads, self.plain = follow, read, plain
        self.always = always
        self.kind, self.wide, self.memory = dtype_of_state, wide, memory

    def build(self, shape: Any) -> None:
        own = (shape[-1],) if self.wide or self.memory else ()
        own = (self.memory, *own) if self.memory else own
        if self.plain:
            self.kept: Any = tf.Variable(tf.zeros(own, self.kind), trainable=False)
        else:
            self.kept = self.add_weight(
                shape=own, initializer="zeros", dtype=self.kind, trainable=False
            )

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training or self.always:
            self.kept.assign(self.follow(self.kept + 0, x))
        return x if self.reads is None else self.reads(x, self.kept)


class Measuring(layers.Layer):
    """Has a metric of its own, which counts what passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        self.metric.update_state(ops.sum(ops.abs(x), axis=-1))
        return x


def _rows(x: Any) -> Any:
    return ops.shape(x)[0]


_of_no_layer: list[keras.Variable] = []


def _outside(x: Any) -> Any:
    [variable] = _of_no_layer
    variable.assign(variable + 1.0)
    return x


#: What a pipeline keeps as one process does.
KEPT: dict[str, Callable[[], layers.Layer]] = {
    "steps": lambda: Keeping(lambda v, x: v + 1, dtype_of_state="int64"),
    "examples": lambda: Keeping(lambda v, x: v + ops.cast(_rows(x), "float32")),
    "whole examples": lambda: Keeping(lambda v, x: v + _rows(x), dtype_of_state="int32"),
    "square of a size": lambda: Keeping(lambda v, x: v + ops.cast(_rows(x), "float32") ** 2),
    "sums": lambda: Keeping(lambda v, x: v + ops.sum(x, axis=0), wide=True),
    "means": lambda: Keeping(lambda v, x: 0.9 * v + 0.1 * ops.mean(x, axis=0), wide=True),
    "read of before": lambda: Keeping(lambda v, x: v, lambda x, v: x + v, wide=True),
    "calls": lambda: Keeping(lambda v, x: v + 1, always=True),
    "metric": Measuring,
}

#: What it cannot, and says so.
NAMED: dict[str, Callable[[], layers.Layer]] = {
    "maximum": lambda: Keeping(lambda v, x: ops.maximum(v, ops.max(x, axis=0)), wide=True),
    "root": lambda: Keeping(lambda v, x: v + ops.sqrt(ops.mean(ops.square(x)))),
    "whole sums": lambda: Keeping(
        lambda v, x: v + ops.sum(ops.cast(x > 0, "int32")), dtype_of_state="int32"
    ),
    "memory": lambda: Keeping(lambda v, x: ops.concatenate([x, v])[:8], memory=8),
    "read": lambda: Keeping(lambda v, x: v + ops.mean(x, axis=0), lambda x, v: x - v, wide=True),
    "variable": lambda: Keeping(lambda v, x: 0.9 * v + 0.1 * tf.reduce_mean(x), plain=True),
    "steps in a variable": lambda: Keeping(lambda v, x: v + 1.0, plain=True, always=True),
}

#: What it cannot keep in one microbatch either.
OUTSIDE: dict[str, Callable[[], layers.Layer]] = {"outside": lambda: layers.Lambda(_outside)}


def kept(strategy: Any, kind: str, *, built: bool = True, **options: Any) -> dict[str, Any]:
    """A model with such a layer, without and with a pipeline: what both have at the end.

    Args:
        strategy: of the calling process; the pipeline is made here.
        kind: of `KEPT` or `NAMED`.
        built: whether the model is before `fit`.
        **options: of the pipeline.
    """
    del strategy
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 6)).astype("float32")
    y = (x @ rng.normal(size=(6, 1))).astype("float32")
    result: dict[str, Any] = {}
    for name in ("plain", "piped"):
        keras.utils.set_random_seed(1)
        made = pipeline(2, **{"microbatches": 4, **options}) if name == "piped" else None
        with tf.distribute.get_strategy().scope() if made is None else made.scope():
            _of_no_layer[:] = [keras.Variable(0.0, trainable=False)]
            layer = {**KEPT, **NAMED, **OUTSIDE}[kind]()
            first, last = layers.Dense(FEATURES, "tanh"), layers.Dense(4, "tanh", name="last")
            model = keras.Sequential([first, layer, last, layers.Dense(1)])
            if built:
                model.build((None, 6))
            model.compile(keras.optimizers.SGD(0.05), "mse")
        history = model.fit(x, y, 16, 2, verbose=0, shuffle=False).history
        own = layer.kept if isinstance(layer, Keeping) else ()
        result[name] = [*model.get_weights(), np.asarray(own), *history.values()]
        result[f"{name} logs"] = sorted(history)
    return result


def _with_weight(model: keras.Model) -> dict[str, Any]:
    return {"loss": lambda y, p: ops.mean((y - p) ** 2, -1) + ops.sum(model.layers[1].kernel ** 2)}


def _measured(model: keras.Model) -> dict[str, Any]:
    return {"metrics": [lambda y, p: ops.sum(model.layers[1].kernel ** 2) + 0 * p[:, 0]]}


class Scaled(keras.losses.Loss):
    """Divides by a moving mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.size = keras.Variable(1.0, trainable=False, name="size")

    def call(self, y: Any, p: Any) -> Any:
        loss = ops.mean((y - p) ** 2, -1) / self.size
        self.size.assign(0.9 * self.size + 0.1 * ops.mean(ops.abs(y)))
        return loss


#: What reads a weight by itself: arguments of `compile`, or what a layer of the last stage does.
READING: dict[str, Callable[[keras.Model], dict[str, Any]]] = {
    "loss": _with_weight,
    "metric": _measured,
    "layer": lambda model: {},
}


def assigns_in_loss(strategy: Any, microbatches: int) -> None:
    """Trains by a loss that keeps something between batches."""
    del strategy
    x = np.ones((16, 6), "float32")
    with pipeline(2, microbatches=microbatches).scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(1)])
        model.compile("sgd", Scaled())
    model.fit(x, x[:, :1], 16, verbose=0)


def reads(strategy: Any, kind: str, cut: bool = True) -> list[float]:
    """How far a model that reads a weight of another layer is from that without a pipeline.

    Args:
        strategy: of the calling process; the pipeline is made here.
        kind: of `READING`.
        cut: whether both layers are in stages of their own.
    """
    del strategy
    x = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
    weights = []
    for name in ("plain", "piped"):
        keras.utils.set_random_seed(1)
        cuts = ["last"] if cut else ["head"]
        made = pipeline(2, microbatches=2, cuts=cuts) if name == "piped" else None
        with tf.distribute.get_strategy().scope() if made is None else made.scope():
            inputs = keras.Input((6,))
            first = layers.Dense(6, "tanh", name="first")
            h = layers.Dense(6, name="last")(first(inputs))
            if kind == "layer":
                h = layers.Lambda(lambda x, own=first: ops.matmul(x, ops.transpose(own.kernel)))(h)
            model = keras.Model(inputs, layers.Dense(1, name="head")(h))
            model.compile(**{"optimizer": "sgd", "loss": "mse", **READING[kind](model)})
        model.fit(x, x[:, :1], 16, 2, verbose=0)
        weights.append(model.get_weights())
    return [float(np.max(np.abs(a - b))) for a, b in zip(*weights, strict=True)]
