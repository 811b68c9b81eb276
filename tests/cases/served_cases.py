"""Programs that do more than Keras's own train_step: own optimizers, inner functions, flags."""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as contexts

from tests.cases import common
from tests.cases.server_cases import ruled


class _Two(keras.Model):
    """Two weights, each with an optimizer of its own, kept in a list or a dict."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.a = self.add_weight(shape=(2,), initializer="zeros", name="a")
        self.b = self.add_weight(shape=(2,), initializer="zeros", name="b")
        pair = [keras.optimizers.SGD(1.0), keras.optimizers.Adam(0.5)]
        self.own: Any = pair if where == "list" else {"a": pair[0], "b": pair[1]}

    def train_step(self, data: Any) -> Any:
        """Gradients that do not depend on the weights."""
        x = data[0] if isinstance(data, tuple) else data
        first, second = self.own.values() if isinstance(self.own, dict) else self.own
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x) * (tf.reduce_sum(self.a) + tf.reduce_sum(self.b))
        grads = tape.gradient(loss, [self.a, self.b])
        first.apply([grads[0]], [self.a])
        second.apply([grads[1]], [self.b])
        return {"loss": loss}


def own_optimizers(strategy: Any, *, where: str, rule: dict[str, Any] | None = None) -> Any:
    """Trains with optimizers in a list or a dict of the model."""
    ruling = contextlib.nullcontext() if strategy is None else ruled(strategy, **(rule or {}))
    with ruling, common.scope(strategy):
        model = _Two(where)
        model.compile()
        model.fit(np.ones((48, 1), "float32"), batch_size=4, epochs=2, verbose=0)
        own = model.own.values() if isinstance(model.own, dict) else model.own
        return {
            "weights": common.weights(model),
            "iterations": [int(optimizer.iterations) for optimizer in own],
        }


class _Flagged(keras.layers.Layer):
    """Notes in a bool weight whether it has met a large number, and for each feature."""

    def build(self, shape: Any) -> None:
        """Makes the flags."""
        made = {"trainable": False, "dtype": "bool", "initializer": "zeros"}
        self.met = self.add_weight(shape=(), name="met", **made)
        self.each = self.add_weight(shape=(shape[-1],), name="each", **made)

    def call(self, inputs: Any) -> Any:
        """Sets the flags that depend on no batch."""
        self.met.assign(True)
        self.each.assign([place % 2 == 0 for place in range(inputs.shape[-1])])
        return inputs


def flags(strategy: Any, *, rule: dict[str, Any] | None = None) -> Any:
    """Trains with bool weights that are assigned in `call`."""
    x, y = common.table(64)
    ruling = contextlib.nullcontext() if strategy is None else ruled(strategy, **(rule or {}))
    with ruling, common.scope(strategy):
        model = keras.Sequential([keras.Input((8,)), _Flagged(), keras.layers.Dense(3)])
        model.compile("sgd", common.sparse_crossentropy())
        model.fit(x, y, 16, 1, verbose=0, shuffle=False)
        found = [np.asarray(model.layers[0].met), np.asarray(model.layers[0].each)]
        return [each.astype("int32") for each in found]


class Inner(keras.Model):
    """A train_step that calls functions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.mean = keras.metrics.Mean("mean")

    def call(self, inputs: Any) -> Any:
        """One layer."""
        return self.dense(inputs)

    @property
    def metrics(self) -> list[Any]:
        """The one metric."""
        return [self.mean]

    @tf.function
    def learn(self, x: Any, y: Any) -> Any:
        if tf.reduce_mean(x) > 100.0:  # AutoGraph's
            x = x / 100.0
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            )
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.mean.update_state(loss, sample_weight=tf.cast(tf.shape(x)[0], tf.float32))
        return loss

    def train_step(self, data: Any) -> Any:
        """Learns in a function of its own."""
        self.learn(*data)
        return {"mean": self.mean.result()}


def inner_function(strategy: Any, *, rule: dict[str, Any] | None = None) -> Any:
    """Trains by a train_step with its own `tf.function`."""
    x, y = common.table(64)
    ruling = contextlib.nullcontext() if strategy is None else ruled(strategy, **(rule or {}))
    with ruling, common.scope(strategy):
        keras.utils.set_random_seed(2)
        model = Inner()
        model.build((None, 8))
        model.compile(keras.optimizers.Adam(0.01))
        done = model.fit(x, y, 16, 2, verbose=0, shuffle=False)
        return {
            "history": done.history["mean"],
            "weights": common.weights(model),
            "iterations": int(model.optimizer.iterations),
        }


def freed(strategy: Any) -> dict[str, Any]:
    """What the servers hold before a model is trained, and when it is gone."""
    found = []
    for _ in range(2):
        gc.collect()
        servers = strategy.servers
        held = [len(each) for each in servers.shelves.held]
        found.append([len(servers._sums), *held])
        alive, large = _train_and_forget(strategy)
    gc.collect()
    return {"found": found, "large": large, "alive": [each() is not None for each in alive]}


def _assigned_fills(function: Any) -> list[str]:
    """The ops of a function that assign a tensor of one value, in a shape that is known."""
    fills = {node.name for node in function.node_def if node.op in ("Fill", "ZerosLike")}
    assigning = (node for node in function.node_def if node.op == "AssignVariableOp")
    return [node.name for node in assigning if node.input[1].partition(":")[0] in fills]


def _train_and_forget(strategy: Any) -> tuple[list[Any], list[str]]:
    x, y = common.tokens(16)
    with strategy.scope():
        model = common.embedding_model()
        model.add(keras.layers.Dense(2000))
        model.compile(keras.optimizers.Adam(), common.sparse_crossentropy())
        model.fit(x, y, 8, 1, verbose=0)
    [traced] = model.train_function._traced.values()
    gone = [model, traced.tally._sums, *(w._value for w in model.optimizer.variables)]
    # A constant of a function outlives it on a server: one of zeros in the shape of a weight.
    context = contexts.context()
    functions = map(context.get_function_def, context.list_function_names())
    large = [name for each in functions for name in _assigned_fills(each)]
    return [weakref.ref(each) for each in gone], large


def reported(strategy: Any) -> str:
    """What is written to standard error while a model with compiled metrics trains."""
    x, _ = common.table(48)
    with common.scope(strategy), contextlib.redirect_stderr(io.StringIO()) as text:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"])
        model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0)
    return text.getvalue()


def kept_in_history(strategy: Any, *, rule: dict[str, Any]) -> dict[str, list[str]]:
    """The types of the values that History has for each name, after two epochs."""
    x, y = common.table(48)
    with ruled(strategy, **rule), common.scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        done = model.fit(x, y, 8, 2, verbose=0)
    return {name: [type(each).__name__ for each in kept] for name, kept in done.history.items()}
