"""Programs in which replicas do not hold their share of the examples in what they reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.common import BATCH, scope

EXAMPLES = 77


def _chosen(y: Any, values: Any) -> Any:
    return tf.boolean_mask(values, y[:, 0] > 0.2)


def _errors(y: Any, predicted: Any) -> Any:
    return tf.square(tf.cast(y, tf.float32) - predicted)


def _by_keras(y: Any, predicted: Any) -> Any:
    return keras.losses.MeanSquaredError()(_chosen(y, y), _chosen(y, predicted))


#: Losses of examples that are chosen by their values.
LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "boolean_mask": lambda y, p: tf.reduce_mean(_chosen(y, _errors(y, p))),
    "gather_nd": lambda y, p: tf.reduce_mean(tf.gather_nd(_errors(y, p), tf.where(y > 0.2))),
    "root": lambda y, p: tf.sqrt(tf.reduce_mean(_chosen(y, _errors(y, p)))),
    "divided": lambda y, p: (
        tf.reduce_sum(_chosen(y, _errors(y, p))) / tf.cast(tf.shape(_chosen(y, y))[0], tf.float32)
    ),
    "keras": _by_keras,
}


class OwnStep(keras.Sequential):
    """Reduces the loss of `LOSSES` by hand."""

    kind = ""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = LOSSES[self.kind](tf.cast(y, tf.float32), self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class AddsChosen(keras.layers.Layer):
    """Adds a loss of some examples, of which it keeps a moving mean."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        chosen = tf.boolean_mask(inputs, inputs[:, 0] > 0.1)
        self.add_loss(0.3 * tf.reduce_mean(chosen**2))
        if training:
            self.mean.assign(0.7 * self.mean + 0.3 * tf.reduce_mean(chosen, 0))
        return inputs


def chosen(strategy: Any, *, kind: str, where: str) -> dict[str, Any]:
    """A loss of chosen examples: compiled, in a `train_step`, as a metric, or added by a layer."""
    x, _ = common.table(EXAMPLES)
    y = np.tanh(0.4 * x.sum(1, keepdims=True) + 0.3).astype("float32")
    with scope(strategy):
        layers = [keras.Input((8,)), keras.layers.Dense(6, "tanh")]
        layers += [AddsChosen()] if where == "layer" else []
        model = (OwnStep if where == "step" else keras.Sequential)([*layers, keras.layers.Dense(1)])
        model.kind = kind
        loss = LOSSES[kind] if where == "compiled" else "mse"
        metrics = [LOSSES[kind]] if where == "metric" else None
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=metrics)
        return {**common.fitted(model, x, y), "evaluate": common.score(model, x[:45], y[:45])}


def masked_normalization(strategy: Any) -> dict[str, Any]:
    """Synchronised statistics of what a mask leaves of sequences of unequal lengths."""
    x, y = common.tokens(EXAMPLES)
    layers = keras.layers
    x[:30, 3:] = 0
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(20, 5, mask_zero=True),
                layers.BatchNormalization(synchronized=True, momentum=0.8),
                layers.LSTM(4),
                layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy())
        return common.fitted(model, x, y)


def balanced_in_the_batch(strategy: Any) -> dict[str, Any]:
    """A compiled loss whose weights are looked up in the frequencies of the batch's classes."""
    x, y = common.table(EXAMPLES)
    ops = keras.ops

    def loss(y: Any, predicted: Any) -> Any:
        y = ops.cast(ops.reshape(y, (-1,)), "int32")
        counts = ops.sum(ops.one_hot(y, 3), 0) + 1.0
        each = keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True)
        return ops.mean(ops.take(ops.sum(counts) / counts, y) * each)

    with scope(strategy):
        model = common.dense_model()
        model.compile(keras.optimizers.SGD(0.05), loss)
        return common.fitted(model, x, y)


class TracksByHand(keras.Sequential):
    """Tracks numbers of its steps with weights of its own, and shows sizes of batches."""

    def make_trackers(self) -> None:
        """Makes the metrics, in the strategy's scope."""
        self.trackers = [keras.metrics.Mean(name=name) for name in ("sized", "sums", "twice")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            errors = _errors(y, self(x, training=True))
            loss = tf.reduce_mean(errors)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        size = tf.cast(tf.shape(x)[0], tf.float32)
        sized, sums, twice = self.trackers
        sized.update_state(tf.sqrt(loss), sample_weight=size)
        sums.update_state(tf.reduce_sum(errors), sample_weight=1.0)
        twice.update_state(loss, sample_weight=2.0)
        return {**{m.name: m.result() for m in self.metrics}, "size": tf.shape(x)[0]}


def weighed_by_hand(strategy: Any) -> dict[str, Any]:
    """Numbers of steps that are tracked with a weight."""
    x, _ = common.table(EXAMPLES)
    y = x.sum(1, keepdims=True)
    with scope(strategy):
        model = TracksByHand([keras.Input((8,)), keras.layers.Dense(1)])
        model.make_trackers()
        model.compile(keras.optimizers.SGD(0.01))
        done = model.fit(x, y, BATCH, 2, shuffle=False, verbose=0)
    return {"history": common.history(done)}
