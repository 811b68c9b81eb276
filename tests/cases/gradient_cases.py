"""Programs that do more with gradients than to apply them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.common import scope
from tfdist.errors import ConfigError, EquivalenceWarning
from tfdist.keras.replica_context import Step

EXAMPLES = 77
ops = keras.ops


class ClipsInApply(keras.optimizers.SGD):
    """Adaptive gradient clipping in `apply`."""

    def apply(self, grads: Iterable[Any], trainable_variables: Any = None) -> Any:
        clipped = []
        for gradient, weight in zip(grads, trainable_variables, strict=True):
            most = 0.02 * ops.maximum(ops.norm(weight), 1e-3)
            factor = most / ops.maximum(ops.norm(gradient), most)
            clipped.append(gradient * factor)
        return super().apply(clipped, trainable_variables)


class NormalizesInApplyGradients(keras.optimizers.SGD):
    """Steps of one length, in `apply_gradients`."""

    def apply_gradients(self, grads_and_vars: Iterable[Any]) -> Any:
        pairs = [(0.1 * g / (ops.norm(g) + 1e-3), v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs)


OPTIMIZERS = {"apply": ClipsInApply, "apply_gradients": NormalizesInApplyGradients}


def _data() -> tuple[np.ndarray, np.ndarray]:
    x, _ = common.table(EXAMPLES)
    return x, np.tanh(0.4 * x.sum(1, keepdims=True) + 0.3).astype("float32")


def _layers() -> list[Any]:
    return [keras.Input((8,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)]


def own_optimizer(strategy: Any, *, method: str, built: bool) -> dict[str, Any]:
    """An optimizer of the program's own that changes gradients before Keras's sees them."""
    with scope(strategy):
        model = keras.Sequential(_layers()[not built :])
        model.compile(OPTIMIZERS[method](0.5), "mse")
        return common.fitted(model, *_data())


class Recomputed(keras.layers.Layer):
    """A dense layer whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(6, "tanh")

    def build(self, shape: Any) -> None:
        """Builds the dense layer."""
        self.dense.build(shape)

    def call(self, inputs: Any) -> Any:
        """The dense layer's outputs."""
        return tf.recompute_grad(lambda x: self.dense(x))(inputs)


def recomputed(strategy: Any) -> dict[str, Any]:
    """Trains with `tf.recompute_grad`, which takes gradients within those of the loss."""
    with scope(strategy), warnings.catch_warnings():
        warnings.simplefilter("error", EquivalenceWarning)
        model = keras.Sequential([keras.Input((8,)), Recomputed(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return common.fitted(model, *_data())


class Tracked(keras.Sequential):
    """A model with steps of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return self.step(x, tf.cast(y, tf.float32), self.trainable_variables)


class Sharpness(Tracked):
    """Sharpness-aware minimization: the gradient at weights moved along the gradient."""

    def step(self, x: Any, y: Any, weights: list[Any]) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            first = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(first, weights)
        moves = [0.3 * g / (tf.linalg.global_norm(gradients) + 1e-12) for g in gradients]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": first}


class ShowsNorm(Tracked):
    """The norm of all gradients among the logs, and TensorFlow's variables as sources."""

    def step(self, x: Any, y: Any, weights: list[Any]) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = 0.1 * tf.reduce_sum(tf.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, [weight.value for weight in weights])
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients)}


class PenalizesGradients(Tracked):
    """A penalty of the gradients of weights."""

    def step(self, x: Any, y: Any, weights: list[Any]) -> dict[str, Any]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            gradients = inner.gradient(loss, weights)
            total = loss + 0.5 * tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradients])
        self.optimizer.apply_gradients(zip(outer.gradient(total, weights), weights, strict=True))
        return {"loss": total}


class BalancesNorms(keras.Model):
    """Weights of two losses that follow the norms of their gradients, as in GradNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.layers.Dense(6, "tanh")
        self.heads = [keras.layers.Dense(1) for _ in range(2)]
        self.scales = self.add_weight(shape=(2,), initializer="ones", name="scales")

    def call(self, inputs: Any) -> list[Any]:
        hidden = self.body(inputs)
        return [head(hidden) for head in self.heads]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[0], tf.cast(data[1], tf.float32)
        kernel, scales = self.body.kernel.value, self.scales.value
        with tf.GradientTape(persistent=True) as tape:
            one, two = self(x, training=True)
            losses = [tf.reduce_mean(tf.square(y - one)), tf.reduce_mean(tf.abs(y * y - two))]
            scaled = [self.scales[i] * loss for i, loss in enumerate(losses)]
            total = scaled[0] + scaled[1]
            norms = [tf.norm(tape.gradient(loss, kernel)) for loss in scaled]
            mean = tf.stop_gradient((norms[0] + norms[1]) / 2)
            balance = tf.abs(norms[0] - mean) + tf.abs(norms[1] - 0.7 * mean)
        weights = [w for w in self.trainable_variables if w is not self.scales]
        gradients = tape.gradient(total, weights)
        change = tape.gradient(balance, scales)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.scales.assign_sub(0.05 * change)
        return {"loss": total}


class UpdatesTwice(keras.Sequential):
    """Two updates by one optimizer, which is asked to scale the first loss alone."""

    def train_step(self, data: Any) -> dict[str, Any]:
        """One step."""
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            size = tf.reduce_mean(tf.square(self(x, training=True)))
        self.optimizer.apply(tape.gradient(size, weights), weights)
        return {"loss": loss, "size": size}


STEPS = {
    "sharpness": Sharpness,
    "norm": ShowsNorm,
    "penalty": PenalizesGradients,
    "twice": UpdatesTwice,
}


@tf.custom_gradient
def clipped(x: Any) -> Any:
    """The same, with a gradient in which no element is large."""
    return tf.identity(x), lambda upstream: tf.clip_by_value(upstream, -0.003, 0.003)


@tf.custom_gradient
def averaged(x: Any) -> Any:
    """The same, with a gradient that is divided by the number of examples."""

    def backward(upstream: Any) -> Any:
        return upstream / tf.cast(tf.shape(upstream)[0], tf.float32)

    return tf.identity(x), backward


@tf.custom_gradient
def centered(x: Any) -> Any:
    """The same, with a gradient without its mean over the batch."""
    return tf.identity(x), lambda upstream: upstream - tf.reduce_mean(upstream, 0, keepdims=True)


@tf.custom_gradient
def shortened(x: Any) -> Any:
    """The same, with a gradient of a small norm over the batch."""
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.01)


@tf.custom_gradient
def shortened_by_row(x: Any) -> Any:
    """The same, with a gradient of a small norm for each example, and the other way round."""
    return tf.identity(x), lambda upstream: -tf.clip_by_norm(upstream, 0.01, axes=[1])


@tf.custom_gradient
def rounded(kernel: Any) -> Any:
    """The signs of a kernel, whose gradient passes where it is small."""
    return tf.sign(kernel), lambda upstream: upstream * tf.cast(tf.abs(kernel) < 0.5, tf.float32)


@tf.custom_gradient
def bounded(kernel: Any) -> Any:
    """A kernel, with a gradient in which no element is large."""
    return tf.identity(kernel), lambda upstream: tf.clip_by_value(upstream, -0.01, 0.01)


@tf.custom_gradient
def product(x: Any, kernel: Any) -> Any:
    """A product, with gradients by hand."""
    return x @ kernel, lambda upstream: (
        tf.matmul(upstream, kernel, transpose_b=True),
        tf.matmul(x, upstream, transpose_a=True),
    )


class Multiplying(keras.layers.Layer):
    """A product with a kernel that a function has changed."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")

    def call(self, inputs: Any) -> Any:
        if self.change is product:
            return product(inputs, self.kernel.value)
        return inputs @ self.change(self.kernel.value)


class Changing(keras.layers.Layer):
    """Changes the gradients of the layers before it."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def call(self, inputs: Any) -> Any:
        return self.change(inputs)


def between_layers(strategy: Any, *, change: str) -> dict[str, Any]:
    """A model in which the gradients are changed on their way, and what is warned of."""
    x, y = common.table(77)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EquivalenceWarning)
        inputs = keras.Input((8,))
        function = globals()[change]
        of_kernel = function in (rounded, bounded, product)
        changing = Multiplying(function) if of_kernel else Changing(function)
        hidden = changing(keras.layers.Dense(8, "tanh")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(8, "relu")(hidden)))
        model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy())
        try:
            done = common.fitted(model, x, y)
        except ConfigError as error:
            return {"warned": [str(error)]}
    return {**done, "warned": [str(each.message) for each in caught]}


def float8(strategy: Any) -> dict[str, Any]:
    """Layers whose scales follow the largest values of the batch; or why they are refused."""
    x, y = common.table(77)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "tanh")])
        model.add(keras.layers.Dense(3))
        model.quantize("float8")
        model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy())
        try:
            return common.fitted(model, x, y)
        except ConfigError as error:
            return {"refused": str(error)}


def own_step(strategy: Any, *, kind: str) -> dict[str, Any]:
    """A `train_step` that computes with gradients of weights."""
    with scope(strategy):
        if kind == "balance":
            model = BalancesNorms()
            model(_data()[0][:2])
        else:
            model = STEPS[kind](_layers())
        model.compile(keras.optimizers.SGD(0.05), "mse")
        x, y = _data()
        if kind == "twice":  # All replicas have as many examples.
            return common.fitted(model, x[:64], y[:64])
        return common.fitted(model, x, y)


def weighed(strategy: Any, *, examples: int, own: bool = False) -> dict[str, Any]:
    """The ranks of the gradients that are multiplied by a replica's share, and the weights.

    Args:
        strategy: what to train on.
        examples: the examples of the training.
        own: whether the optimizer changes gradients before Keras's `apply` has them.
    """
    ranks: list[int] = []
    times = Step._times

    def noted(step: Step, value: Any, factor: Any) -> Any:
        ranks.append(int(value.shape.rank))
        return times(step, value, factor)

    x, y = common.table(examples)
    with mock.patch.object(Step, "_times", noted), scope(strategy):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, use_bias=False)])
        kind = NormalizesInApplyGradients if own else keras.optimizers.SGD
        model.compile(kind(0.1), common.sparse_crossentropy())
        model.fit(x, y, 8, 1, shuffle=False, verbose=0)
    return {"ranks": ranks, "weights": common.weights(model)}
