"""Losses that are no means over the examples, at each place where a program may have them."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.common import BATCH, scope
from tfdist.errors import ConfigError, EquivalenceWarning

EXAMPLES = 77


def _error(y: Any, predicted: Any) -> Any:
    return tf.square(tf.cast(y, tf.float32) - predicted)


def _ratio(y: Any, predicted: Any) -> Any:
    wanted = tf.cast(y > 0, tf.float32)
    return tf.reduce_sum(_error(y, predicted) * wanted) / tf.reduce_sum(wanted)


def _own_dice(y: Any, predicted: Any) -> Any:
    y, p = tf.cast(y > 0, tf.float32), tf.sigmoid(predicted)
    return 1.0 - (2.0 * tf.reduce_sum(y * p) + 1.0) / (tf.reduce_sum(y) + tf.reduce_sum(p) + 1.0)


def _deviation(y: Any, predicted: Any) -> Any:
    mean = tf.reduce_mean(_error(y, predicted), axis=0)
    return tf.reduce_sum(tf.sqrt(mean)) + 0.1 * tf.maximum(tf.reduce_mean(predicted), 0.01)


def _products(values: Any) -> Any:
    return tf.matmul(values, values, transpose_a=True)


def _uncorrelated(y: Any, p: Any) -> Any:
    """Less the more the predictions correlate with the labels, as in correlation analysis."""
    both, count = tf.concat([p, tf.square(p)], 1), tf.cast(tf.shape(p)[0], tf.float32)
    own = _products(both) / count + 0.1 * tf.eye(2)
    shared = tf.matmul(both, tf.cast(y, tf.float32), transpose_a=True) / count
    explained = tf.linalg.inv(own) @ shared @ tf.transpose(shared)
    return 0.1 * tf.linalg.logdet(own) - tf.linalg.trace(explained)


def _determinant(y: Any, p: Any) -> Any:
    size = tf.cast(tf.shape(p)[0], tf.float32)
    return -tf.linalg.logdet(tf.matmul(p, p, transpose_a=True) / size + tf.eye(1))


@tf.function
def _root(y: Any, p: Any) -> Any:
    return tf.sqrt(tf.reduce_mean(_error(y, p)))


#: Functions of labels and predictions that return a number.
LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda y, p: tf.reduce_mean(_error(y, p)),
    "sum": lambda y, p: tf.reduce_sum(_error(y, p)),
    "keras sum": lambda y, p: keras.ops.sum(keras.ops.square(y - p)) * 0.5,
    "sum of means": lambda y, p: tf.reduce_sum(tf.reduce_mean(_error(y, p), axis=1)),
    "sum and mean": lambda y, p: tf.reduce_sum(_error(y, p)) + 3.0 * tf.reduce_mean(tf.abs(p)),
    "over global batch": lambda y, p: tf.reduce_sum(_error(y, p)) * (1.0 / BATCH),
    "over own batch": lambda y, p: (
        tf.reduce_sum(_error(y, p)) / tf.cast(tf.shape(p)[0], tf.float32)
    ),
    "divided first": lambda y, p: tf.reduce_sum(_error(y, p) / tf.cast(tf.shape(p)[0], tf.float32)),
    "times a share": lambda y, p: tf.reduce_sum(
        tf.reduce_mean(_error(y, p), axis=1) * (1.0 / tf.cast(tf.shape(p)[0], tf.float32))
    ),
    "l2": lambda y, p: tf.nn.l2_loss(tf.cast(y, tf.float32) - p),
    "root": lambda y, p: tf.sqrt(tf.reduce_mean(_error(y, p))),
    "norm": lambda y, p: tf.norm(tf.cast(y, tf.float32) - p),
    "plus a count": lambda y, p: (
        tf.reduce_mean(_error(y, p)) + 0.01 * tf.cast(tf.shape(p)[0], tf.float32)
    ),
    "ratio": _ratio,
    "dice": _own_dice,
    "deviation": _deviation,
    "average": lambda y, p: tf.nn.compute_average_loss(_error(y, p)[:, 0]),
    "average of global": lambda y, p: tf.nn.compute_average_loss(
        _error(y, p)[:, 0], global_batch_size=BATCH
    ),
    "by example": lambda y, p: _error(y, p)[:, 0],
    "gram": lambda y, p: 0.01 * tf.reduce_mean(_products(tf.concat([p, 2.0 - p], 1)) ** 2) ** 0.5,
    "correlated": _uncorrelated,
    "determinant": _determinant,
    "gram of transposed": lambda y, p: tf.reduce_mean(tf.transpose(p) @ (p - 1.0)),
    "root in a function": _root,
}


def _rate(name: str) -> float:
    return (
        2e-3
        if "sum" in name or name in ("l2", "norm", "by example", "gram of transposed")
        else 0.05
    )


def compiled(
    strategy: Any, *, name: str, weighted: bool = False, even: bool = False
) -> dict[str, Any]:
    """Compiles a model with a loss of `LOSSES`, or of Keras, and fits uneven batches.

    With `even` batches have one size, which is known when a step is traced.
    """
    x, _ = common.table(EXAMPLES)
    y = (x.sum(1, keepdims=True) > 0.3).astype("float32")
    weights = (1.0 + x[:, 0] ** 2).astype("float32") if weighted else None
    known = {"Dice": keras.losses.Dice, "Tversky": keras.losses.Tversky}
    with scope(strategy):
        last = "sigmoid" if name in known else None
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, last)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        loss = known[name]() if name in known else LOSSES[name]
        model.compile(keras.optimizers.SGD(_rate(name), momentum=0.5), loss)
        if even:
            return common.fitted(model, _even(x, y))
        return common.fitted(model, x, y, sample_weight=weights)


#: Losses that reduce the batch to a number for each feature.
BY_FEATURE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda y, p: keras.ops.sum(keras.ops.square(y - p), axis=0),
    "kept": lambda y, p: keras.ops.sum(keras.ops.square(y - p), axis=0, keepdims=True),
    "mean": lambda y, p: keras.ops.mean(keras.ops.square(y - p), axis=0),
    "root": lambda y, p: keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - p), axis=0)),
    "deviation": lambda y, p: keras.ops.std(y - p, axis=0),
}


class _Total(keras.metrics.Sum):
    """Adds up the mean squared errors of each feature."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Adds those of a batch."""
        return super().update_state(BY_FEATURE["mean"](y_true, y_pred))


def by_feature(strategy: Any, *, name: str, reduction: str) -> dict[str, Any]:
    """Compiles a model with a loss of `BY_FEATURE`, and metrics of this form."""

    class Loss(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return BY_FEATURE[name](y_true, y_pred)

    x, _ = common.table(EXAMPLES)
    with scope(strategy):
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        optimizer = keras.optimizers.SGD(1e-3, momentum=0.5)
        model.compile(optimizer, Loss(reduction=reduction), metrics=[BY_FEATURE[name], _Total()])
        return common.fitted(model, x, x[:, :3])


class _OwnCall(keras.losses.Loss):
    """Reduces the batch by itself."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        del sample_weight
        return tf.reduce_sum(_error(y_true, y_pred))


def own_call(strategy: Any) -> dict[str, Any]:
    """Compiles a model with a loss that leaves Keras's reductions out."""
    x, _ = common.table(EXAMPLES)
    with scope(strategy):
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.SGD(2e-3), _OwnCall())
        return common.fitted(model, x, x[:, :1])


def _by_rows(tape: Any, model: Any, hidden: Any, p: Any, y: Any, loss: Any) -> list[Any]:
    del hidden, loss
    return list(tape.gradient(p, model.trainable_variables, output_gradients=2.0 * (p - y)))


def _by_divided_rows(tape: Any, model: Any, hidden: Any, p: Any, y: Any, loss: Any) -> list[Any]:
    del hidden, loss
    size = tf.cast(tf.shape(p)[0], p.dtype)
    return list(tape.gradient(p, model.trainable_variables, output_gradients=(p - y) / size))


def _by_hand(tape: Any, model: Any, hidden: Any, p: Any, y: Any, loss: Any) -> list[Any]:
    del p, y
    first, last = model.trainable_variables[:2], model.trainable_variables[2:]
    of_hidden = tape.gradient(loss, hidden)
    return [
        *tape.gradient(hidden, first, output_gradients=of_hidden),
        *tape.gradient(loss, last, output_gradients=tf.constant(1.0)),
    ]


#: Gradients that a step takes with `output_gradients`: of a sum, of a mean, and layer by layer.
BY_OUTPUT: dict[str, Callable[..., list[Any]]] = {
    "rows": _by_rows,
    "divided rows": _by_divided_rows,
    "by hand": _by_hand,
}


class _ByOutput(keras.Model):
    """Takes the gradients of its weights by a function of `BY_OUTPUT`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
        self.gradients = BY_OUTPUT[name]

    def call(self, inputs: Any) -> Any:
        """The predictions."""
        return self.last(self.first(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        """One step of SGD."""
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            hidden = self.first(x)
            p = self.last(hidden)
            loss = tf.reduce_mean(tf.square(p - y))
        gradients = self.gradients(tape, self, hidden, p, y, loss)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"error": loss}


def by_output(strategy: Any, *, name: str) -> dict[str, Any]:
    """A `train_step` that takes gradients by a function of `BY_OUTPUT`."""
    x, _ = common.table(EXAMPLES)
    with scope(strategy):
        model = _ByOutput(name)
        model.compile(keras.optimizers.SGD(2e-3 if name == "rows" else 0.05))
        return common.fitted(model, x, x[:, :1])


def _even(*data: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data).batch(BATCH, drop_remainder=True)


def sized(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A function of labels and predictions that needs their number when it is traced."""

    def needing(y: Any, p: Any) -> Any:
        return function(y, p) + 0.0 * float(y.shape[0])

    return needing


class _Root(keras.losses.Loss):
    """A number for the whole batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return tf.sqrt(tf.reduce_mean(_error(y_true, y_pred)))


def weighted_numbers(strategy: Any, *, reduction: str, masked: bool = False) -> dict[str, Any]:
    """Fits by a loss that is a number, where the first replica's examples count nothing.

    They have a weight of 0, and with `masked` a mask that leaves none of them.
    """
    x, _ = common.table(EXAMPLES)
    x = x.reshape(EXAMPLES, 4, 2)
    place = np.arange(EXAMPLES) % BATCH
    x[:, 3] = 0
    x[place < BATCH * 2 // 3] *= not masked
    weights = np.where(place < BATCH * 2 // 3, masked, 1 + place / BATCH).astype("float32")
    weights = weights[:, None].repeat(4, 1) if masked else weights
    y = x.sum((1, 2))[:, None, None].repeat(4, 1) + 0.5
    with scope(strategy):
        first = [keras.layers.Masking()] if masked else []
        layers = [*first, keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4, 2)), *layers])
        model.compile(keras.optimizers.SGD(0.01), _Root(reduction=reduction))
        return common.fitted(model, x, y, sample_weight=weights)


class _Adds(keras.layers.Layer):
    """Adds a loss of its input."""

    def __init__(self, how: str) -> None:
        super().__init__(activity_regularizer="l2" if how == "regularizer" else None)
        self.how = how
        self.scale = self.add_weight(name="scale", shape=(6,), initializer="ones")

    def call(self, inputs: Any) -> Any:
        """Returns the inputs, of which it adds a loss."""
        if self.how == "sum":
            self.add_loss(1e-3 * keras.ops.sum(inputs))
        elif self.how == "by example":
            self.add_loss(1e-3 * keras.ops.sum(keras.ops.square(inputs), axis=1))
        elif self.how == "weights":
            self.add_loss(0.1 * keras.ops.sum(keras.ops.square(self.scale)) + 0.01)
            return inputs * self.scale
        elif self.how == "mean":
            self.add_loss(keras.ops.mean(keras.ops.square(inputs)))
        elif self.how == "root":
            self.add_loss(keras.ops.sqrt(keras.ops.mean(keras.ops.square(inputs))))
        return inputs


def added_in_double(strategy: Any) -> dict[str, Any]:
    """A layer adds a loss in float32 to one in float64."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        return added(strategy, how="activity")
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def added(strategy: Any, *, how: str, pairs: bool = False) -> dict[str, Any]:
    """A layer that adds a loss: a sum over the batch, one loss an example, a mean, a weight's.

    The compiled loss may need the examples of all replicas, which on threads then take turns.
    """
    x, y = common.table(EXAMPLES)
    with scope(strategy):
        adds = keras.layers.ActivityRegularization(l2=0.01) if how == "activity" else _Adds(how)
        layers = [keras.layers.Dense(6, "tanh"), adds, keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        loss = keras.losses.Circle(gamma=2.0) if pairs else common.sparse_crossentropy()
        model.compile(keras.optimizers.SGD(0.05), loss)
        return common.fitted(model, x, y)


def added_in_a_loop(strategy: Any) -> dict[str, Any]:
    """The sum of what each replica's layers add, in a loop, after replicas have taken turns."""
    x, _ = common.table(8)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6), _Adds("sum")])
    if strategy is None:
        model(x, training=True)  # Each call forgets the losses of the one before.
        return {"added": float(sum(model.losses))}
    rows = len(x) // strategy.num_replicas_in_sync

    @tf.function
    def step() -> Any:
        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            first = rows * context.replica_id_in_sync_group
            own = tf.constant(x)[first : first + rows]
            model(own, training=True)
            context.all_gather(model(own, training=True), axis=0)
            return tf.add_n(model.losses)

        return strategy.reduce("SUM", strategy.run(replica), axis=None)

    return {"added": float(step())}


class OwnStep(keras.Model):
    """Reduces its loss by hand, and clips, scales or accumulates gradients by hand."""

    def __init__(self, name: str, change: str) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.loss_of, self.change = LOSSES[name], change
        if change == "temperature":
            self.temperature = self.add_weight(name="temperature", initializer="zeros")
        self.tracker = keras.metrics.Mean(name="loss")
        self.total = keras.metrics.Sum(name="total")

    def call(self, inputs: Any) -> Any:
        """The predictions."""
        return self.out(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        """One step of SGD."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
            if self.change == "decay":
                loss += 0.1 * tf.reduce_sum(tf.square(self.out.kernel))
            elif self.change == "temperature":
                loss = loss * tf.exp(self.temperature) - 2.0 * self.temperature
            target = self.optimizer.scale_loss(loss) if self.change == "scale" else loss
        weights = self.trainable_variables
        gradients = tape.gradient(target, weights)
        if self.change == "clip":
            gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
        elif self.change == "normalize":
            gradients = [g / (tf.norm(g) + 1e-6) for g in gradients]
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        if self.loss_of is LOSSES["by example"]:
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}
        self.tracker.update_state(loss)
        self.total.update_state(loss)
        return {"loss": self.tracker.result(), "total": self.total.result(), "raw": loss}


def by_hand(strategy: Any, *, name: str, change: str = "", even: bool = False) -> dict[str, Any]:
    """A `train_step` with a loss of `LOSSES`; for `even` see `compiled`."""
    x, _ = common.table(EXAMPLES)
    y = (x.sum(1, keepdims=True) > 0.3).astype("float32")
    with scope(strategy):
        model = OwnStep(name, change)
        optimizer = keras.optimizers.SGD(_rate(name), momentum=0.5)
        if change == "scale":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
        model.compile(optimizer)
        done = common.fitted(model, *([_even(x, y)] if even else [x, y]))
    done["history"].pop("raw", None)
    return done


class Counting(keras.layers.Layer):
    """Keeps counts and statistics of what it has seen."""

    def build(self, shape: Any) -> None:
        """Makes weights that no optimizer trains."""
        make = self.add_weight
        self.examples = make(name="examples", dtype="int64", initializer="zeros", trainable=False)
        self.steps = make(name="steps", dtype="int32", initializer="zeros", trainable=False)
        self.total = make(name="total", shape=(shape[-1],), initializer="zeros", trainable=False)
        self.mean = make(name="mean", shape=(shape[-1],), initializer="zeros", trainable=False)
        self.scale = make(name="scale", initializer="ones", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the inputs."""
        if training:
            self.examples.assign_add(tf.shape(inputs, tf.int64)[0])
            self.steps.assign_add(1)
            self.total.assign(0.9 * self.total + 0.1 * tf.reduce_sum(inputs, 0))
            # TensorFlow's own variable, after an assignment by Keras's.
            self.total.value.assign_add(0.01 * tf.reduce_sum(inputs, 0))
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, 0))
            self.scale.assign(tf.sqrt(tf.reduce_mean(tf.square(inputs))))
        return inputs


def counters(strategy: Any) -> dict[str, Any]:
    """Trains with a layer that counts examples and steps, and keeps sums and a deviation."""
    x, y = common.table(EXAMPLES)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), Counting(), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        model.fit(x, y, BATCH, 2, shuffle=False, verbose=0)
    return {"weights": common.weights(model), "examples": int(np.asarray(model.layers[0].examples))}


class Bank(keras.layers.Layer):
    """Keeps the newest rows that it has seen, like MoCo's queue."""

    size = 64

    def build(self, shape: Any) -> None:
        """Makes the queue."""
        self.queue = self.add_weight(
            name="queue", shape=(self.size, shape[-1]), initializer="zeros", trainable=False
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the inputs."""
        if training:
            self.queue.assign(tf.concat([inputs, self.queue], 0)[:64])
        return inputs


def memory_bank(strategy: Any) -> str:
    """What a model says that keeps rows of its batches."""
    x, y = common.table(EXAMPLES)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), Bank(), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), common.sparse_crossentropy())
        try:
            model.fit(x, y, BATCH, 1, shuffle=False, verbose=0)
        except Exception as error:
            return str(error)
    return ""


def _contrast(y: Any, z: Any) -> Any:
    similar = tf.matmul(z, z, transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(z)[0]), similar)


def _centred(values: Any) -> Any:
    return values - tf.reduce_mean(values)


class _MaskedByLabels(keras.losses.Loss):
    """A loss that decides itself which examples count, as `Circle` does."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        each = tf.reduce_logsumexp(y_pred @ tf.transpose(y_pred), axis=1)
        each._keras_mask = y_true[:, 0] > 0
        return each


class _OfAnotherLoss(keras.losses.Loss):
    """A loss of all pairs, computed by other losses, in one of which the examples meet again."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        alike = tf.cast(tf.equal(y_true, tf.transpose(y_true)), y_pred.dtype)
        pairs = keras.losses.MeanSquaredError()(alike, y_pred @ tf.transpose(y_pred))
        return pairs + keras.losses.Circle(gamma=2.0)(y_true, 2.0 * y_pred)


class _OfALayer(keras.losses.Loss):
    """A distance between what a layer computes of normalized labels and predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.features = keras.layers.Rescaling(2.0, offset=0.1)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        apart = [x / (1e-3 + tf.math.reduce_std(x)) for x in (tf.cast(y_true, "float32"), y_pred)]
        return tf.reduce_mean(tf.square(self.features(apart[0]) - self.features(apart[1])))


def _labels(y: Any) -> Any:
    return tf.cast(tf.reshape(y, [-1]), tf.int32)


def _by_class_counts(y: Any, z: Any) -> Any:
    counts = tf.cast(tf.math.bincount(_labels(y), minlength=3), tf.float32)
    return tf.reduce_mean(tf.square(z), -1) * tf.gather(1.0 / (1.0 + counts), _labels(y))


def _from_class_means(y: Any, z: Any) -> Any:
    means = tf.math.unsorted_segment_mean(z, _labels(y), 3)
    return tf.reduce_mean(tf.square(z - tf.gather(means, _labels(y))), -1)


def _from_class_sums(y: Any, z: Any) -> Any:
    sums = tf.scatter_nd(_labels(y)[:, None], z, [3, 3])
    return tf.reduce_mean(tf.square(z - 0.01 * tf.gather_nd(sums, _labels(y)[:, None])), -1)


def _by_repeats(y: Any, z: Any) -> Any:
    _, places, counts = tf.unique_with_counts(_labels(y))
    return tf.reduce_mean(tf.square(z), -1) / tf.cast(tf.gather(counts, places), tf.float32)


def _largest_by_class(y: Any, z: Any) -> Any:
    return 0.1 * tf.reduce_sum(tf.math.unsorted_segment_max(z[:, 0], _labels(y), 3))


def _singular(y: Any, z: Any) -> Any:
    return -0.01 * tf.reduce_sum(tf.linalg.svd(z, compute_uv=False))


#: Losses in which the examples of a batch meet.
PAIRS: dict[str, Any] = {
    "masked by labels": _MaskedByLabels(),
    "of another loss": _OfAnotherLoss(),
    "of a layer": _OfALayer(),
    "in a condition": lambda y, z: tf.cond(
        tf.reduce_mean(z) > 0.05, lambda: tf.reduce_max(z), lambda: tf.reduce_mean(z * z)
    ),
    "circle": keras.losses.Circle(gamma=2.0),
    "contrast": _contrast,
    "einsum": lambda y, z: tf.reduce_mean(tf.exp(-tf.einsum("id,jd->ij", z, z))),
    "transposed": lambda y, z: tf.reduce_mean(tf.nn.relu(1.0 - z @ keras.ops.transpose(z))),
    "differences": lambda y, z: tf.reduce_mean(tf.square(z[:, None, :] - z[None, :, :])),
    "labels": lambda y, z: tf.reduce_mean(
        tf.reduce_mean(z) * tf.cast(tf.equal(y, tf.reshape(y, [1, -1])), tf.float32)
    ),
    "variance": lambda y, z: tf.reduce_mean(tf.math.reduce_variance(z, axis=0)),
    "largest": lambda y, z: tf.square(z) / tf.reduce_max(tf.abs(z)),
    "correlation": lambda y, z: -tf.reduce_mean(_centred(z[:, 0]) * _centred(z[:, 1])),
    "share of a sum": lambda y, z: tf.reduce_sum(
        tf.square(z[:, 0]) * tf.math.softmax(z[:, 1] * tf.cast(y[:, 0], tf.float32))
    ),
    "softmax of the batch": lambda y, z: tf.reduce_mean(
        tf.reduce_sum(z * keras.ops.softmax(z * tf.cast(y, tf.float32), axis=0), 0)
    ),
    "hidden": lambda y, z: (
        0.1 * tf.reduce_logsumexp(z)
        + tf.cond(tf.reduce_mean(z) > 0.05, lambda: tf.reduce_max(z), lambda: tf.reduce_mean(z * z))
    ),
    "neighbours": lambda y, z: tf.square(z - tf.roll(z, 1, 0)),
    "backwards": lambda y, z: tf.reduce_mean(tf.square(0.7 * z + 0.3 * z[::-1])),
    "first rows": lambda y, z: tf.reduce_mean(tf.square(z[:3])),
    "weighed by place": lambda y, z: (
        tf.square(z) * 0.9 ** tf.range(tf.shape(z)[0], dtype=tf.float32)[:, None]
    ),
    "first half": lambda y, z: tf.where(
        tf.range(tf.shape(z)[0])[:, None] < tf.shape(z)[0] // 2, tf.square(z), 0.0
    ),
    "groups": lambda y, z: (
        0.1
        * tf.reduce_sum(
            tf.reduce_prod(tf.reshape(z[: tf.shape(z)[0] // 2 * 2], (-1, 2, z.shape[-1])), 1)
        )
    ),
    "by class counts": _by_class_counts,
    "from class means": _from_class_means,
    "from class sums": _from_class_sums,
    "by repeats": _by_repeats,
    "largest by class": _largest_by_class,
    "singular values": _singular,
    "divided twice": lambda y, z: tf.reduce_sum(tf.square(z / tf.cast(tf.shape(z)[0], tf.float32))),
}


class LossByHand(keras.Sequential):
    """A step that computes its loss by `loss_of`."""

    loss_of: Callable[[Any, Any], Any]

    def train_step(self, data: Any) -> Any:
        """One step of the compiled optimizer."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": loss}


def scaled_pairs(strategy: Any) -> list[str]:
    """The warnings of a step that scales a loss of pairs."""
    x, y = common.table(EXAMPLES)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = LossByHand([keras.Input((8,)), keras.layers.Dense(3)])
        model.loss_of = PAIRS["variance"]
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3)))
        model.fit(x, y[:, None], BATCH, 1, shuffle=False, verbose=0)
    return [str(w.message) for w in caught if w.category is EquivalenceWarning]


def pairs(strategy: Any, *, name: str, by_hand: bool, examples: int = EXAMPLES) -> dict[str, Any]:
    """The warnings and the weights of a fit with a loss of `PAIRS`, compiled or by hand."""
    x, y = common.table(examples)
    last = 2 * BATCH + 1
    others = (x[:last], y[:last, None])

    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = LossByHand if by_hand else keras.Sequential
        model = made([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(3)])
        model.loss_of = lambda y, z: tf.reduce_mean(PAIRS[name](y, z))
        model.compile(keras.optimizers.SGD(1e-3), PAIRS[name])
        try:
            # The last batch of `others` has one example: some replicas have none.
            done = model.fit(x, y[:, None], BATCH, 1, shuffle=False, verbose=0)
            model.fit(*others, BATCH, 1, shuffle=False, verbose=0)
            value = None if by_hand else model.evaluate(*others, BATCH, verbose=0)
        except ConfigError as error:
            return {"refused": str(error)}
    named = [str(w.message) for w in caught if w.category is EquivalenceWarning]
    report = {"history": {} if by_hand else common.history(done), "value": value}
    return {"named": named, **report, "weights": common.weights(model)}


class Mixing(keras.Sequential):
    """Adds the batch to itself in another order, as MixUp does."""

    def train_step(self, data: Any) -> Any:
        """One step of the compiled optimizer."""
        x, y = data
        x, y = 0.7 * x + 0.3 * x[::-1], 0.7 * y + 0.3 * y[::-1]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


#: For each loss of a `Mixing`, the activation of its predictions.
MIXED = {
    "categorical_crossentropy": "softmax",
    "binary_crossentropy": "sigmoid",
    "mse": "linear",
    "contrast": "linear",
}


def mixed(strategy: Any, *, loss: str) -> dict[str, Any]:
    """The warnings and the weights of a fit whose step mixes the batch, with a loss of `MIXED`."""
    x, y = common.table(EXAMPLES)
    y = np.eye(3, dtype="float32")[y]
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        last = keras.layers.Dense(3, MIXED[loss])
        model = Mixing([keras.Input((8,)), keras.layers.Dense(4), last])
        model.compile(keras.optimizers.SGD(1e-2), PAIRS.get(loss, loss))
        model.fit(x, y, BATCH, 1, shuffle=False, verbose=0)
    named = [str(w.message) for w in caught if w.category is EquivalenceWarning]
    return {"named": named, "weights": common.weights(model)}


class Fading(keras.Sequential):
    """Divides the predictions by their places in the batch."""

    def train_step(self, data: Any) -> Any:
        """One step of the compiled optimizer."""
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            place = tf.cast(tf.range(tf.shape(predicted)[0]), predicted.dtype)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted / (1 + place)[:, None])
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def faded(strategy: Any, *, loss: str) -> dict[str, Any]:
    """As `mixed`, of a recurrent model whose step counts an example by its place in the batch."""
    x, y = common.table(EXAMPLES)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layers = [keras.layers.Reshape((2, 4)), keras.layers.SimpleRNN(3)]
        model = Fading([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.SGD(1e-2), PAIRS.get(loss, loss))
        model.fit(x, np.eye(3, dtype="float32")[y], BATCH, 1, shuffle=False, verbose=0)
    named = [str(w.message) for w in caught if w.category is EquivalenceWarning]
    return {"named": named, "weights": common.weights(model)}


def normalized_pairs(strategy: Any, *, scaled: bool) -> dict[str, Any]:
    """Trains by `Circle` behind a BatchNormalization of the whole batch, on uneven batches."""
    x, y = common.table(BATCH + 5)
    weights = np.linspace(0.2, 2.0, len(x)).astype("float32")
    with scope(strategy):
        normalization = keras.layers.BatchNormalization(synchronized=True)
        layers = [keras.layers.Dense(6), normalization, keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        optimizer = keras.optimizers.SGD(1e-3)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=16.0)
        model.compile(optimizer, keras.losses.Circle(gamma=2.0))
        return common.fitted(model, x, y, sample_weight=weights)


def gathered(strategy: Any) -> dict[str, Any]:
    """Trains by negatives in the whole batch, gathered as the warning of `PAIRS` advises."""
    x, y = common.table(EXAMPLES)

    def contrast(y: Any, z: Any) -> Any:
        all_of_them = tf.distribute.get_replica_context().all_gather(z, axis=0)
        similar = tf.matmul(z, all_of_them, transpose_b=True)
        return tf.reduce_mean(tf.reduce_logsumexp(similar, axis=1) - tf.reduce_sum(z * z, axis=1))

    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(1e-3), contrast)
        return common.fitted(model, x, y)


def without_pairs(strategy: Any) -> bool:
    """Trains layers that move the axis of the examples, but keep examples apart."""
    x, y = common.table(EXAMPLES)
    layers = keras.layers
    with scope(strategy):
        inputs = keras.Input((8,))
        h = layers.Reshape((4, 2))(inputs)
        h = layers.MultiHeadAttention(2, 4)(h, h)
        h = layers.LSTM(4, return_sequences=True)(layers.LayerNormalization()(h))
        h = layers.Dot((1, 1))([h, layers.Permute((1, 2))(h)])
        h = layers.BatchNormalization()(layers.Flatten()(h))
        model = keras.Model(inputs, layers.Dense(3)(h))
        model.compile("sgd", common.sparse_crossentropy())
        model.fit(x, y, BATCH, 1, verbose=0)
    return True


class Keeps(keras.layers.Layer):
    """Leaves an auxiliary loss where the model finds it later."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.dense, self.where = keras.layers.Dense(6), where
        self.found: Any = {"list": [], "dictionary": {}}.get(where)
        self.others = types.SimpleNamespace()

    def call(self, inputs: Any) -> Any:
        """The features."""
        hidden = self.dense(inputs)
        value = keras.ops.mean(hidden**4)
        if self.where == "list":
            self.found.append(value)
        elif self.where == "dictionary":
            self.found["value"] = value
        elif self.where == "object":
            self.others.value = value
        else:
            self.found = value
        return keras.ops.tanh(hidden)

    def taken(self) -> Any:
        """What the last call has left."""
        if self.where == "list":
            value = sum(self.found)
            self.found.clear()
            return value
        if self.where == "object":
            return self.others.value
        return self.found["value"] if self.where == "dictionary" else self.found


class ReadsKept(keras.Model):
    """Its loss has a part that a layer keeps; the other part needs the examples of all replicas."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.keeps, self.out = Keeps(where), keras.layers.Dense(3)

    def build(self, shape: Any) -> None:
        """Builds the layers, so that the first trace is that of the step."""
        self.keeps.dense.build(shape)
        self.keeps.built = True
        self.out.build((None, 6))

    def call(self, inputs: Any) -> Any:
        """The scores."""
        return self.out(self.keeps(inputs))

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled loss and what the layer keeps."""
        return super().compute_loss(*args, **kwargs) + 0.5 * self.keeps.taken()


def kept(strategy: Any, *, where: str) -> dict[str, Any]:
    """A model whose loss reads what a layer's `call` has kept, after replicas have taken turns."""
    x, y = common.table(EXAMPLES)
    with scope(strategy), warnings.catch_warnings():
        if where == "eager":  # Eager steps do not show that the loss is a mean, as it is.
            warnings.simplefilter("ignore", EquivalenceWarning)
        model = ReadsKept(where)
        model.build((None, 8))
        loss = common.sparse_crossentropy() if where == "eager" else keras.losses.Circle(gamma=2.0)
        model.compile(keras.optimizers.SGD(0.05), loss, run_eagerly=where == "eager")
        return common.fitted(model, x, y)


def _summed_in_a_loop(y: Any, p: Any) -> Any:
    error = _error(y, p)
    rows = tf.shape(error)[0]
    return tf.while_loop(
        lambda i, total: i < rows, lambda i, total: (i + 1, total + error[i, 0]), (0, 0.0)
    )[1]


#: Losses of which tfdist cannot know what one process makes of them: a loss of the model that is
#: compiled, or else of a step by hand, options of `compile`, whether all batches have one size, and
#: what is said.
DOUBTFUL: dict[str, tuple[Callable[[Any, Any], Any], dict[str, Any], bool, str]] = {
    "sum over a size": (
        LOSSES["over global batch"],
        {"loss": sized(LOSSES["over global batch"])},
        True,
        "The loss is a sum over the examples times a factor, and the program needs the size",
    ),
    "determinant over a size": (
        sized(_determinant),
        {},
        True,
        "The loss is a sum over the examples times a factor, and the program needs the size",
    ),
    "largest": (
        lambda y, p: tf.reduce_max(_error(y, p)),
        {},
        False,
        "The loss is reduced to a number by Max",
    ),
    "in a loop": (
        _summed_in_a_loop,
        {},
        False,
        "The loss is reduced to a number by StatelessWhile",
    ),
    "eager": (
        LOSSES["root"],
        {"loss": LOSSES["root"], "run_eagerly": True},
        False,
        "does not show how a loss, or another number, depends on the examples",
    ),
}


def doubtful(strategy: Any, *, name: str) -> list[str]:
    """What is said of a loss of `DOUBTFUL`, by warnings and by an error."""
    x, _ = common.table(2 * BATCH)
    y = (x.sum(1, keepdims=True) > 0.3).astype("float32")
    by_hand, options, even, _ = DOUBTFUL[name]
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=even)
    said: list[str] = []
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = keras.Sequential if options else LossByHand
        model = made([keras.Input((8,)), keras.layers.Dense(1)])
        model.loss_of = by_hand
        model.compile("sgd", **options)
        try:
            model.fit(data, verbose=0)
        except ConfigError as error:
            said.append(str(error))
    return said + [str(w.message) for w in caught if issubclass(w.category, EquivalenceWarning)]
