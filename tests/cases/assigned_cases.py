"""Weights that a step assigns by itself: rows of a batch, statistics, codewords, maxima."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.common import BATCH, scope
from tests.cases.loss_cases import EXAMPLES, Bank
from tfdist.errors import ConfigError, EquivalenceWarning

#: New values of a queue of 64, by itself and a batch of a static size; the last two have no rows.
GIVEN: dict[str, Callable[[Any, Any], Any]] = {
    "the batch itself": lambda queue, x: x,
    "in front": lambda queue, x: tf.concat([x, queue], 0)[:64],
    "in a slice": lambda queue, x: keras.ops.slice_update(queue, [0, 0], x[:2]),
    "by a condition": lambda queue, x: tf.where(
        tf.range(64)[:, None] < 2, tf.concat([x[:2], queue[2:]], 0), queue
    ),
    "the first alone": lambda queue, x: tf.tile(x[:1], [64, 1]) * 0.5 + 0.5 * x[0] + 0.0 * queue,
    "a mean": lambda queue, x: tf.concat([tf.reduce_mean(x, 0, keepdims=True), queue[1:]], 0),
    "products": lambda queue, x: tf.concat([tf.matmul(x, x, transpose_a=True), queue[8:]], 0),
}


class GivenRows(Bank):
    """Gives its queue what a function makes of it and the batch."""

    def __init__(self, given: str) -> None:
        super().__init__()
        self.given = given
        self.size = BATCH if given == "the batch itself" else 64

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the inputs."""
        if training:
            self.queue.assign(GIVEN[self.given](self.queue.value, inputs))
        return inputs


def given_rows(strategy: Any, *, given: str) -> dict[str, Any]:
    """The weights of a model with a queue, and what it says if it may not be trained."""
    x, y = common.table(2 * BATCH)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), GivenRows(given), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        try:
            model.fit(x, y, BATCH, 1, shuffle=False, verbose=0)
        except ConfigError as error:
            return {"refused": str(error)}
    return {"weights": common.weights(model)}


def _class_of(x: Any) -> Any:
    return tf.cast(tf.clip_by_value(tf.round(tf.abs(x[:, 0]) * 20.0), 0.0, 60.0), tf.int32)


def _rows_of(x: Any) -> Any:
    return tf.IndexedSlices(x, _class_of(x))


#: Changes of some elements of a variable `(61, 8)`.
IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda v, x: v.scatter_add(tf.IndexedSlices(tf.ones_like(x), _class_of(x))),
    "update": lambda v, x: v.scatter_update(_rows_of(x)),
    "largest": lambda v, x: v.scatter_max(_rows_of(x)),
    "of a mean": lambda v, x: v.scatter_add(
        tf.IndexedSlices(tf.reduce_mean(x, 0, keepdims=True), tf.constant([3]))
    ),
    "elements": lambda v, x: v.scatter_nd_add(_class_of(x)[:, None], tf.ones_like(x)),
    "elements given": lambda v, x: v.scatter_nd_update([[3]], tf.reduce_mean(x, 0)[None]),
    "a sum taken away": lambda v, x: v.scatter_nd_sub([[3]], tf.reduce_sum(x, 0)[None]),
    "a slice": lambda v, x: v[0].assign(0.9 * v[0] + 0.1 * tf.reduce_mean(x, 0)),
    "a slice of sums": lambda v, x: v[3].assign(v[3] + tf.reduce_sum(x, 0)),
}
#: Those of `IN_PLACE` that a Keras weight takes on every strategy: on workers a tensor stands for
#: it. That has no slices to assign; rows of the batch are refused, and a maximum is warned of.
OF_WEIGHTS = ("add", "of a mean", "elements", "elements given", "a sum taken away")
#: Changes by which each replica would put its own examples at a place, or choose that.
OF_EXAMPLES: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda v, x: v[: tf.shape(x)[0]].assign(x),
    "at": lambda v, x: v[_class_of(x)[0]].assign(tf.ones([8])),
    "at a place of all": lambda v, x: v.scatter_add(
        tf.IndexedSlices(tf.ones([1, 8]), tf.reduce_max(_class_of(x))[None])
    ),
}


class _InPlace(keras.layers.Layer):
    """Changes elements of a variable in each step."""

    def __init__(self, how: str, of_keras: bool) -> None:
        super().__init__()
        self.change, self.own = {**IN_PLACE, **OF_EXAMPLES}[how], None
        if of_keras:
            self.kept = self.add_weight(shape=(61, 8), trainable=False, name="kept")
        else:
            self.own = tf.Variable(tf.zeros([61, 8]), trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the inputs."""
        if training:
            self.change(self.kept.value if self.own is None else self.own, inputs)
        return inputs


def in_place(strategy: Any, *, how: str, of_keras: bool = False) -> dict[str, Any]:
    """The variable after training, or the reason why that was refused."""
    x, y = common.table(EXAMPLES)
    with scope(strategy):
        layer = _InPlace(how, of_keras)
        model = keras.Sequential([keras.Input((8,)), layer, keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        try:
            done = common.fitted(model, x, y)
        except ConfigError as error:
            return {"refused": str(error)}
    if layer.own is not None:
        done["own"] = layer.own.numpy()
    return done


class _Seen(keras.layers.Layer):
    """Notes the features that were ever above a bound, and those that always were below another."""

    def build(self, shape: Any) -> None:
        """Makes the flags."""
        made = {"shape": shape[1:], "dtype": "bool", "trainable": False}
        self.above = self.add_weight(name="above", initializer="zeros", **made)
        self.below = self.add_weight(name="below", initializer="ones", **made)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the inputs."""
        ops = keras.ops
        if training:
            self.above.assign(ops.logical_or(self.above, ops.any(inputs > 2.0, axis=0)))
            self.below.assign(ops.logical_and(self.below, ops.all(inputs < 2.4, axis=0)))
        return inputs


def flags(strategy: Any) -> dict[str, Any]:
    """The weights of a model with flags."""
    x, y = common.table(EXAMPLES)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), _Seen(), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        return common.fitted(model, x, y)


class Codebook(keras.layers.Layer):
    """Codewords that follow the examples next to them, as in VQ-VAE with moving averages."""

    def build(self, shape: Any) -> None:
        """Makes the codewords, how many examples each has had, and a share of those."""
        start = keras.initializers.RandomNormal(seed=3)
        self.words = self.add_weight(shape=(4, shape[-1]), initializer=start, trainable=False)
        self.counts = self.add_weight(shape=(4,), initializer="ones", trainable=False)
        self.means = self.add_weight(shape=(4,), initializer="ones", trainable=False)
        self.ratio = self.add_weight(shape=(4,), initializer="ones", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """The nearest codewords, with the gradient of the inputs."""
        ops = keras.ops
        distances = ops.sum(ops.square(inputs[:, None] - self.words[None]), -1)
        nearest = ops.one_hot(ops.argmin(distances, -1), 4)
        chosen = ops.matmul(nearest, self.words)
        if training:
            self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(nearest, 0))
            sums = ops.matmul(ops.transpose(nearest), inputs)
            self.words.assign(0.9 * self.words + 0.1 * sums / ops.expand_dims(self.counts, -1))
            self.means.assign(0.9 * self.means + 0.1 * ops.mean(nearest, 0))
            self.ratio.assign(1.0 / self.means)
        return inputs + ops.stop_gradient(chosen - inputs)


def codebook(strategy: Any) -> dict[str, Any]:
    """Weights that a step assigns from others that it has assigned before."""
    x, _ = common.table(EXAMPLES)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), Codebook()])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return common.fitted(model, x, x)


def _by_numpy(x: Any) -> Any:
    return tf.ensure_shape(tf.numpy_function(lambda a: a.mean(0), [x], tf.float32), (8,))


#: Values of the examples that are neither means nor sums, each with the op that hides this.
HIDDEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "maximum": (lambda x: tf.reduce_max(x) * tf.ones(8), "Max"),
    "maxima": (lambda x: tf.reduce_max(x, 0), "Max"),
    "mean of maxima": (lambda x: tf.reduce_mean(tf.reduce_max(x, 0)) * tf.ones(8), "Max"),
    "divided twice": (
        lambda x: tf.reduce_sum((x / tf.cast(tf.shape(x)[0], tf.float32)) ** 2, 0),
        "Sum",
    ),
    "product": (lambda x: tf.reduce_prod(tf.tanh(x), 0), "Prod"),
    "largest": (lambda x: tf.reduce_mean(tf.math.top_k(tf.transpose(x), 3)[0], 1), "TopKV2"),
    "condition": (
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_mean(x, 0), lambda: x[0] * 0.0),
        "StatelessIf",
    ),
    "numpy": (_by_numpy, "PyFunc"),
}


class Tracks(keras.layers.Layer):
    """Keeps a moving average of a value of the examples, and does not use it."""

    def __init__(self, value_of: Callable[[Any], Any]) -> None:
        super().__init__()
        self.value_of = value_of

    def build(self, shape: Any) -> None:
        """Makes the average."""
        start = "zeros"
        self.kept = self.add_weight(
            name="kept", shape=shape[-1:], initializer=start, trainable=False
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        """The inputs."""
        if training:
            self.kept.assign(0.9 * self.kept + 0.1 * self.value_of(inputs))
        return inputs


def hidden(strategy: Any, *, kind: str) -> list[str]:
    """The warnings of a model whose weight is given a value of `HIDDEN`."""
    x, y = common.table(EXAMPLES)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = keras.Sequential(
            [keras.Input((8,)), Tracks(HIDDEN[kind][0]), keras.layers.Dense(3)]
        )
        model.compile("sgd", common.sparse_crossentropy())
        model.fit(x, y, BATCH, 1, verbose=0)
    return [str(w.message) for w in caught if issubclass(w.category, EquivalenceWarning)]


def _number(x: Any) -> Any:
    return keras.ops.arange(keras.ops.shape(x)[0])


#: Values of the examples, by their places in the batch.
BY_PLACE: dict[str, Callable[[Any], Any]] = {
    "one-hot": lambda x: keras.ops.matmul(
        keras.ops.transpose(keras.ops.one_hot(_number(x) % 8, 8)), x[:, 0]
    ),
    "faded": lambda x: tf.reduce_sum(x * tf.pow(0.9, tf.cast(_number(x), tf.float32))[:, None], 0),
    "neighbours": lambda x: tf.reduce_sum(x[1:] * x[:-1], 0),
    "first": lambda x: tf.reduce_sum(x[:2], 0),
}


class _ByPlace:
    """A metric of a value of `BY_PLACE`."""

    def __init__(self, kind: str) -> None:
        super().__init__(name="by_place")  # type: ignore[call-arg]
        self.kind = kind

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds that of the predictions."""
        del y_true, sample_weight
        super().update_state(BY_PLACE[self.kind](y_pred))  # type: ignore[misc]


class SumByPlace(_ByPlace, keras.metrics.Sum):
    """Adds a value up."""


class MeanByPlace(_ByPlace, keras.metrics.Mean):
    """The mean of a value's numbers."""


def by_place(strategy: Any, *, kind: str) -> dict[str, Any]:
    """A weight and a metric that are given a value of `BY_PLACE`, and whether both are named."""
    x, _ = common.table(EXAMPLES)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracks = Tracks(BY_PLACE[kind])
        metric = MeanByPlace if kind == "first" else SumByPlace
        model = keras.Sequential([keras.Input((8,)), tracks, keras.layers.Dense(8, name="out")])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[metric(kind)])
        done = common.fitted(model, x, x)
    texts = [str(w.message) for w in caught if issubclass(w.category, EquivalenceWarning)]
    named = [t for t in texts if "of a batch meet in a value that the step gives to a" in t]
    in_layer = [text for text in named if "/tracks" in text]
    return {**done, "named": {"weight": bool(in_layer), "metric": len(named) > len(in_layer)}}


class Queue(keras.Model):
    """Keeps the embeddings of the last examples, of all replicas, in a weight."""

    def __init__(self, put: str) -> None:
        super().__init__()
        self.put, self.embed = put, keras.layers.Dense(4)
        self.queue = self.add_weight(shape=(32, 4), initializer="zeros", trainable=False)
        self.place = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        return self.embed(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            z = self(x, training=True)
            loss = self.compute_loss(x, y, z)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        context = tf.distribute.get_replica_context()
        rows = context.all_gather(z, axis=0) if context.num_replicas_in_sync > 1 else z
        if self.put == "first":
            self.queue.assign(keras.ops.concatenate([rows, self.queue])[:32])
        else:
            places = (self.place + tf.range(tf.shape(rows)[0])) % 32
            self.queue.assign(tf.tensor_scatter_nd_update(self.queue, places[:, None], rows))
            self.place.assign((self.place + tf.shape(rows)[0]) % 32)
        return {"loss": loss, "kept": tf.reduce_mean(self.queue)}


def queue_of_all(strategy: Any, *, put: str, even: bool) -> dict[str, Any]:
    """Weights and logs of a model that keeps the rows that it has gathered.

    Args:
        strategy: the strategy to train with.
        put: `first`, or `at a place` that goes round.
        even: whether all batches have the same size, known when a step is traced.
    """
    x, _ = common.table(61)
    y = np.tanh(x[:, :1] + x[:, 1:2])
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=even)
    with scope(strategy):
        model = Queue(put)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return common.fitted(model, data)
