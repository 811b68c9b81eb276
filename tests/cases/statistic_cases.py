"""Statistics of a batch that a program computes by itself: in weights, in metrics, in layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.common import BATCH, scope

EXAMPLES = 77
CLASSES = 3
ops = keras.ops


def _segments(centers: Any, y: Any, moves: Any) -> Any:
    """Adds rows up by classes, and divides by how many a class has."""
    total = tf.math.unsorted_segment_sum(moves, y, CLASSES)
    count = tf.math.unsorted_segment_sum(tf.ones_like(moves[:, :1]), y, CLASSES)
    return centers - 0.5 * total / (1.0 + count)


def _segment_means(centers: Any, y: Any, moves: Any) -> Any:
    return centers - 0.3 * tf.math.unsorted_segment_mean(moves, y, CLASSES)


def _scattered(centers: Any, y: Any, moves: Any) -> Any:
    return tf.tensor_scatter_nd_sub(centers, y[:, None], 0.02 * moves)


def _by_einsum(centers: Any, y: Any, moves: Any) -> Any:
    return centers - 0.02 * tf.einsum("bk,bd->kd", tf.one_hot(y, CLASSES), moves)


def _by_counts(centers: Any, y: Any, moves: Any) -> Any:
    counts = tf.cast(tf.math.bincount(y, minlength=CLASSES, maxlength=CLASSES), tf.float32)
    return 0.9 * centers + 0.1 * tf.reduce_mean(moves, 0) * counts[:, None] / 40.0


#: From the centers of classes, labels `(batch,)` and each example's distance to its center.
CENTERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "segments": _segments,
    "segment_means": _segment_means,
    "scattered": _scattered,
    "einsum": _by_einsum,
    "counts": _by_counts,
}


class Centers(keras.Sequential):
    """Moves a center of each class towards the examples of the class."""

    kind = ""

    def build(self, shape: Any = None) -> None:
        super().build(shape)
        if not hasattr(self, "centers"):
            self.centers = self.add_weight(
                shape=(CLASSES, 8), initializer="zeros", trainable=False, name="centers"
            )

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        centers = tf.convert_to_tensor(self.centers.value)
        self.centers.assign(CENTERS[self.kind](centers, y, tf.gather(centers, y) - x))
        logs: dict[str, Any] = super().train_step(data)
        return logs


def centers(strategy: Any, *, kind: str, even: bool = False) -> dict[str, Any]:
    """Centers of classes, which a step computes from the examples of each."""
    x, y = common.table(64 if even else EXAMPLES)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=even)
    with scope(strategy):
        model = Centers([keras.Input((8,)), keras.layers.Dense(CLASSES)])
        model.kind = kind
        model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy())
        done = model.fit(data, epochs=2, verbose=0)
    return {"history": common.history(done), "weights": common.weights(model)}


@tf.function
def _root_of_squares(x: Any) -> Any:
    return ops.sqrt(ops.sum(x * x, 0))


@tf.function(jit_compile=True)
def _root_by_xla(x: Any) -> Any:
    return ops.sqrt(ops.sum(x * x, 0))


def _iterated(moments: Any) -> Any:
    start = (0, tf.ones_like(moments))
    return tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, ops.sqrt(v + moments)), start)[1]


#: From the inputs of a batch and the running mean's variable, a mean and a variance.
MOMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "two passes": lambda x, mean: ops.mean((x - ops.mean(x, 0)) ** 2, 0),
    "keras": lambda x, mean: ops.moments(x, axes=[0])[1],
    "tensorflow": lambda x, mean: tf.nn.moments(x, [0])[1],
    "deviation": lambda x, mean: ops.std(x, axis=0),
    "in a function": lambda x, mean: _root_of_squares(x),
    "compiled by XLA": lambda x, mean: _root_by_xla(x),
    "in a loop": lambda x, mean: _iterated(ops.mean(x * x, 0)),
    "around what was assigned": lambda x, mean: ops.mean((x - mean.value) ** 2, 0),
    "standardized": lambda x, mean: ops.mean(
        ops.abs((x - ops.mean(x, 0)) / (1e-3 + ops.std(x, axis=0))) ** 3, 0
    ),
}


class Running(keras.layers.Layer):
    """Keeps moments of what passes through it; does not use them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def build(self, shape: Any) -> None:
        self.mean, self.variance = [
            self.add_weight(shape=(shape[-1],), initializer=name, trainable=False, name=name)
            for name in ("zeros", "ones")
        ]

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.8 * self.mean + 0.2 * ops.mean(inputs, 0))
            moment = MOMENTS[self.kind](inputs, self.mean)
            self.variance.assign(0.8 * self.variance + 0.2 * moment)
        return inputs


def running(strategy: Any, *, kind: str) -> dict[str, Any]:
    """A layer's running moments, of examples that differ from replica to replica."""
    x, y = common.table(EXAMPLES)
    x = np.sort(x, axis=0)
    with scope(strategy):
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(6), Running(kind), keras.layers.Dense(CLASSES)]
        )
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        done = model.fit(x, y, BATCH, 2, shuffle=False, verbose=0)
    return {"history": common.history(done), "weights": common.weights(model)}


class BatchDeviation(keras.layers.Layer):
    """The minibatch standard deviation of progressive GANs, as one more feature."""

    def call(self, inputs: Any) -> Any:
        deviation = ops.mean(ops.std(inputs, axis=0))
        return ops.concatenate([inputs, ops.ones_like(inputs[:, :1]) * deviation], 1)

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], shape[1] + 1)


class TiledDeviation(BatchDeviation):
    """The same, as StyleGAN's programs write it."""

    def call(self, inputs: Any) -> Any:
        deviation = tf.reshape(tf.reduce_mean(tf.math.reduce_std(inputs, 0)), (1, 1))
        return tf.concat([inputs, tf.tile(deviation, [tf.shape(inputs)[0], 1])], 1)


class Pairs(keras.layers.Layer):
    """Attends from each example to the others of the batch."""

    def call(self, inputs: Any) -> Any:
        return ops.softmax(inputs @ ops.transpose(inputs)) @ inputs


class _Centring:
    """Operations of a functional model, without a layer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, inputs: Any) -> Any:
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class Grouped(keras.layers.Layer):
    """Statistics of groups of neighbours, as in ghost batch normalization."""

    def call(self, inputs: Any) -> Any:
        count = ops.shape(inputs)[0] // 4 * 4
        groups = ops.reshape(inputs[:count], (-1, 4, 6))
        centred = ops.reshape(groups - ops.mean(groups, 1, keepdims=True), (-1, 6))
        return ops.concatenate([centred, inputs[count:]], 0)


class Generated(keras.layers.Layer):
    """Weights that another layer makes of the mean example, as a hypernetwork does."""

    def __init__(self) -> None:
        super().__init__()
        self.make = keras.layers.Dense(36)

    def build(self, shape: Any) -> None:
        del shape
        self.make.build((1, 6))

    def call(self, inputs: Any) -> Any:
        made = self.make(ops.mean(inputs, 0, keepdims=True))
        return ops.matmul(inputs, ops.reshape(made, (6, 6)))


class PassesOn(keras.layers.Layer):
    """A layer that mixes tokens, not examples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = keras.layers.BatchNormalization(synchronized=True)

    def call(self, inputs: Any) -> Any:
        steps = ops.transpose(ops.reshape(inputs, (-1, 3, 2)), (1, 0, 2))
        mixed = steps - ops.mean(steps, 0, keepdims=True)
        lengths = tf.cast(3 * tf.sigmoid(inputs[:, 0]), tf.int32)
        mask = tf.sequence_mask(lengths, dtype=tf.float32)  # As long as the longest.
        weights = tf.reduce_sum(mask, 1, keepdims=True)
        return self.norm(ops.reshape(ops.transpose(mixed, (1, 0, 2)), (-1, 6)) * weights)


def _rounds(step: Callable[[Any], Any], goes_on: Callable[[Any, Any], Any]) -> Any:
    """A layer that repeats something in a loop of TensorFlow's."""

    def call(inputs: Any) -> Any:
        def body(i: Any, x: Any) -> tuple[Any, Any]:
            return i + 1, step(x)

        return tf.while_loop(goes_on, body, [0, inputs], maximum_iterations=20)[1]

    return keras.layers.Lambda(call)


class Branching(keras.layers.Layer):
    """Does something else to a batch while training, in a condition."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def build(self, shape: Any) -> None:
        del shape
        self.steps = self.add_weight(initializer="zeros", trainable=False, name="steps")

    def call(self, inputs: Any) -> Any:
        return tf.cond(self.steps < 1.0, lambda: self.change(inputs), lambda: 0.5 * inputs)


class Filled(keras.layers.Layer):
    """Goes on until a flag of each example is set, and leaves those alone whose flag is."""

    def call(self, inputs: Any) -> Any:
        def body(x: Any, done: Any) -> tuple[Any, Any]:
            new = tf.where(done, x, 0.7 * x)
            return new, tf.reduce_max(tf.abs(new), 1, keepdims=True) < 0.3

        flags = tf.zeros_like(inputs[:, :1], tf.bool)
        return tf.while_loop(lambda _, d: ~tf.reduce_all(d), body, [inputs, flags])[0]


class Codebook(keras.layers.Layer):
    """Replaces each example by its code; codes follow their examples before that."""

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(
            shape=(3, shape[-1]), initializer="glorot_uniform", trainable=False, name="codes"
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        nearest = ops.argmin(ops.sum((inputs[:, None] - self.codes) ** 2, -1), -1)
        if training:
            chosen = ops.one_hot(nearest, 3)
            count = ops.sum(chosen, 0)[:, None] + 1e-3
            self.codes.assign(
                0.9 * self.codes + 0.1 * ops.matmul(ops.transpose(chosen), inputs) / count
            )
        return inputs + ops.stop_gradient(ops.take(self.codes, nearest, 0) - inputs)


LAYERS: dict[str, Callable[[], Any]] = {
    "codebook": Codebook,
    "in a loop": lambda: _rounds(lambda x: 0.9 * (x - tf.reduce_mean(x, 0)), lambda i, _: i < 3),
    "pairs in a loop": lambda: _rounds(
        lambda x: tf.nn.softmax(tf.matmul(x, x, transpose_b=True)) @ x, lambda i, _: i < 2
    ),
    "until converged": lambda: _rounds(
        lambda x: 0.5 * tf.tanh(x) + 0.1,
        lambda _, x: tf.reduce_max(tf.abs(x - 0.5 * tf.tanh(x) - 0.1)) > 0.1,
    ),
    "until near": lambda: _rounds(
        lambda x: 0.5 * tf.tanh(x) + 0.1,
        lambda _, x: tf.reduce_any(tf.abs(x - 0.5 * tf.tanh(x) - 0.1) > 0.1),
    ),
    "from one to the next": lambda: keras.layers.Lambda(
        lambda x: tf.ensure_shape(tf.scan(lambda kept, row: 0.5 * kept + row, x), [None, 6])
    ),
    "in a branch": lambda: Branching(lambda x: x - tf.reduce_mean(x, 0)),
    "python": lambda: keras.layers.Lambda(
        lambda x: tf.ensure_shape(tf.numpy_function(np.tanh, [x], tf.float32), [None, 6]),
        output_shape=(6,),
    ),
    "rows in a loop": lambda: _rounds(
        lambda x: x - 0.1 * tf.reduce_mean(x, 1, keepdims=True), lambda i, _: i < 3
    ),
    "rows in a branch": lambda: Branching(lambda x: x - tf.reduce_mean(x, 1, keepdims=True)),
    "until all are done": Filled,
    "each row": lambda: keras.layers.Lambda(
        lambda x: tf.map_fn(lambda row: row / (1.0 + tf.reduce_max(tf.abs(row))), x)
    ),
    "deviation": BatchDeviation,
    "centred": lambda: keras.layers.Lambda(lambda x: x - ops.mean(x, 0, keepdims=True)),
    "tiled": TiledDeviation,
    "pairs": Pairs,
    "mixed up": lambda: keras.layers.Lambda(lambda x: 0.7 * x + 0.3 * ops.flip(x, 0)),
    "by operations": lambda: _Centring(name="centring"),
    "last operations": lambda: _Centring(name="centring"),
    "grouped": Grouped,
    "generated": Generated,
    "tokens": PassesOn,
}


def mixing(strategy: Any, *, kind: str) -> dict[str, Any]:
    """A layer of the program's own, and what is said of it."""
    x, y = common.table(EXAMPLES)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = LAYERS[kind]()
        hidden = keras.layers.Dense(6)(start := keras.Input((8,)))
        is_last = kind == "last operations"
        last = keras.layers.Dense(CLASSES)
        model = keras.Model(start, layer(last(hidden)) if is_last else last(layer(hidden)))
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        report = common.fitted(model, x, y)
    named = [str(each.message) for each in caught if "meet in the layer" in str(each.message)]
    return {**report, "named": [text for text in named if repr(layer.name) in text]}


class Flat(keras.Model):
    """A language model of ragged sequences, whose loss is the mean over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.logits = keras.layers.Embedding(20, 6), keras.layers.Dense(20)

    def call(self, inputs: Any) -> Any:
        return self.logits(self.embedding(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        tokens = data.flat_values
        with tf.GradientTape() as tape:
            logits = self(tokens, training=True)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits((tokens + 1) % 20, logits)
            loss = tf.reduce_mean(each)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def flat(strategy: Any) -> dict[str, Any]:
    """The mean over the values of a ragged batch, of which examples have 1 to 6."""
    rng = np.random.default_rng(0)
    rows = [list(rng.integers(1, 20, rng.integers(1, 7))) for _ in range(EXAMPLES)]
    data = tf.data.Dataset.from_tensor_slices(tf.ragged.constant(rows, tf.int32)).batch(BATCH)
    with scope(strategy):
        model = Flat()
        model.compile(keras.optimizers.SGD(0.5))
        done = model.fit(data, epochs=2, verbose=0)
    return {"history": common.history(done), "weights": common.weights(model)}


class Seen(keras.layers.Layer):
    """Counts the examples that it is given, whatever for.

    Args:
        variable: whether in a variable of TensorFlow's.
        needs_size: whether by a number of Python's.
    """

    def __init__(self, variable: bool = False, needs_size: bool = False) -> None:
        super().__init__()
        self.variable, self.needs_size = variable, needs_size

    def build(self, _: Any) -> None:
        kept = {"trainable": False, "name": "count"}
        self.count = (
            tf.Variable(0.0, **kept)
            if self.variable
            else self.add_weight(shape=(), initializer="zeros", **kept)
        )

    def call(self, inputs: Any) -> Any:
        size = inputs.shape[0] if self.needs_size else tf.shape(inputs)[0]
        self.count.assign_add(float(size) if self.needs_size else tf.cast(size, tf.float32))
        return inputs


def counted(strategy: Any) -> dict[str, Any]:
    """A weight that predictions change too: its value after each call, and what names it."""
    x, y = common.table(EXAMPLES)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = keras.Sequential([keras.Input((8,)), Seen(), keras.layers.Dense(CLASSES)])
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        seen = model.layers[0].count
        model.fit(x, y, BATCH, verbose=0)
        model.evaluate(x, y, BATCH, verbose=0)
        before = float(seen.numpy())
        unnamed = [str(each.message) for each in caught]
        model.predict(x, BATCH, verbose=0)
    named = [str(each.message) for each in caught[len(unnamed) :]]
    return {"before": before, "after": float(seen.numpy()), "unnamed": unnamed, "named": named}


class Counts(keras.Model):
    """A subclassed model, which sees the shapes of its batches."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.seen, self.last = Seen(**options), keras.layers.Dense(CLASSES)

    def call(self, inputs: Any) -> Any:
        return self.last(self.seen(inputs))


def counted_evenly(strategy: Any, *, variable: bool, needs_size: bool, batch: int) -> Any:
    """What is counted in batches of one size, which is known when a step is traced.

    Returns:
        The count, and the warnings that name it.
    """
    x, y = common.table(4 * batch)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Counts(variable=variable, needs_size=needs_size)
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        model.fit(data, verbose=0)
    named = [str(each.message) for each in caught if "count" in str(each.message)]
    return float(model.seen.count.numpy()), named


class Averages(keras.layers.Layer):
    """Moves its inputs by their mean so far, which it reads from sums that it has just changed."""

    def build(self, _: Any) -> None:
        self.count, self.total = (
            self.add_weight(shape=(), initializer="zeros", trainable=False, name=name)
            for name in ("count", "total")
        )

    def call(self, inputs: Any) -> Any:
        self.count.assign_add(ops.cast(ops.size(inputs), self.count.dtype))
        self.total.assign_add(ops.sum(ops.cast(inputs, self.total.dtype)))
        return inputs + 0.1 * ops.cast(self.total / self.count, inputs.dtype)


def averaged(strategy: Any) -> dict[str, Any]:
    """Sums that a layer in half precision keeps, and reads in the same step."""
    x = np.tile(np.array([[0.5, 1.0, -0.25, 2.0]], "float32"), (EXAMPLES, 2))  # exact in halves
    with scope(strategy):
        layers = [Averages(dtype="mixed_float16"), keras.layers.Dense(1, dtype="float32")]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return common.fitted(model, x, x[:, :1], epochs=1)


class MadeInBuild(keras.layers.Layer):
    """Moves its inputs by sums in variables of TensorFlow's, which its `build` makes."""

    def build(self, shape: Any) -> None:
        self.count = tf.Variable(1.0, trainable=False)
        self.total = tf.Variable(tf.zeros([shape[-1]]), trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.count.assign_add(tf.cast(tf.shape(inputs)[0], tf.float32))
            self.total.assign_add(tf.reduce_sum(inputs, 0))
        return inputs + 0.1 * self.total / self.count


class SumsInBuild(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(6), MadeInBuild(), keras.layers.Dense(1)]

    def call(self, inputs: Any, training: bool = False) -> Any:
        first, second, third = self.parts
        return third(second(first(inputs), training=training))


def made_in_build(strategy: Any) -> dict[str, Any]:
    """Two variables of TensorFlow's that are made in the first step, of different shapes."""
    x, _ = common.table(EXAMPLES)
    with scope(strategy):
        model = SumsInBuild()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        report = common.fitted(model, x, x[:, :1])
    kept = model.parts[1]
    return {**report, "kept": [float(kept.count.numpy()), kept.total.numpy()]}
