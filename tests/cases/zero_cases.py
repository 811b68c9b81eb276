"""Cases of ZeRO: what a process holds, and programs in which a shard is not enough."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.common import BATCH, UNEVEN, scope
from tests.cases.harness_cases import rank
from tfdist.sharding import variables


class Rounded(keras.optimizers.SGD):
    """An optimizer of the program's own, which looks at the whole of a gradient."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> Any:
        largest = tf.reduce_max(tf.abs(gradient))
        return super().update_step(gradient / largest, variable, learning_rate)


class Clipped(keras.optimizers.SGD):
    """An optimizer of the program's own, which clips gradients by itself."""

    def _clip_gradients(self, grads: Any) -> Any:
        return [each / (keras.ops.norm(each) + 1e-6) for each in grads]


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "ema": lambda: keras.optimizers.AdamW(0.01, use_ema=True, gradient_accumulation_steps=2),
    "lamb": lambda: keras.optimizers.Lamb(0.01, weight_decay=0.1, global_clipnorm=0.05),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01, gradient_accumulation_steps=3),
    "muon": lambda: keras.optimizers.Muon(
        0.01, weight_decay=0.1, clipnorm=0.05, use_ema=True, ema_overwrite_frequency=4
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adafactor(0.01), initial_scale=2.0**20
    ),
    "own": lambda: Rounded(0.01),
    "clipped": lambda: Clipped(0.01),
}


def _fit(
    strategy: Any, make: Callable[[], Any], model: Any = None, scale: float = 1.0
) -> tuple[Any, Any]:
    x, y = common.table(UNEVEN)
    # One feature of one batch: its row of the first kernel gets gradients that overflow.
    x[BATCH : BATCH + 4, 0] *= scale
    with scope(strategy):
        model = model or common.dense_model()
        model.compile(make(), common.sparse_crossentropy())
        return model, model.fit(x, y, BATCH, 2, shuffle=False, verbose=0)


def _with_given_weights(*layers: keras.layers.Layer) -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), *layers])
    rng = np.random.default_rng(4)
    model.set_weights([rng.normal(scale=0.3, size=w.shape) for w in model.get_weights()])
    return model


def held(strategy: Any, optimizer: str) -> dict[str, Any]:
    """The numbers that this process keeps of the optimizer's variables like a weight, and all."""
    model, _ = _fit(strategy, OPTIMIZERS[optimizer])
    like = [v for v in model.optimizer.variables if len(v.shape)]
    here = [getattr(v, "shard", v) for v in like]
    return {
        "here": sum(int(np.prod(v.shape)) for v in here),
        "whole": sum(int(np.prod(v.shape)) for v in like),
        "indivisible": sum(int(np.prod(v.shape)) for v in like if not hasattr(v, "shard")),
        "state": [np.asarray(v) for v in model.optimizer.variables],
    }


def refused(strategy: Any, optimizer: str) -> str:
    """The error of training with an optimizer; empty if it trains."""
    return common.error_of(lambda: _fit(strategy, OPTIMIZERS[optimizer]))


def of_whole_weights(
    strategy: Any, optimizer: str, path: str | None = None, checkpoints: str = "whole"
) -> dict[str, Any]:
    """Training with an optimizer that computes with whole weights; a file in the middle of it."""
    ids, labels = common.tokens(UNEVEN)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    with scope(strategy):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,), dtype="int32")
        hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 8)(inputs))
        constraint = keras.constraints.MaxNorm(0.9)
        hidden = keras.layers.Dense(16, "relu", kernel_constraint=constraint)(hidden)
        hidden = keras.layers.EinsumDense("ab,bcd->acd", (4, 6), bias_axes="cd")(hidden)
        outputs = keras.layers.Dense(2, name="last")(keras.layers.Flatten()(hidden))
        model = keras.Model(inputs, outputs)
        model.compile(OPTIMIZERS[optimizer](), common.sparse_crossentropy(), metrics=["accuracy"])
        history = model.fit(ids, labels, **options)
        here = [getattr(v, "shard", v) for v in model.optimizer.variables]
        result = {
            "here": [int(np.prod(v.shape)) for v in here],
            "middle": [np.asarray(v) for v in model.optimizer.variables],
        }
        if path is not None:
            strategy.checkpoints = checkpoints
            model.save(path)
            strategy.checkpoints = "whole"
            model = keras.models.load_model(path)
        history = model.fit(ids, labels, **options)
        return {
            **result,
            "loss": history.history["loss"],
            "weights": common.weights(model),
            "state": [np.asarray(v) for v in model.optimizer.variables],
        }


def state_of_file(strategy: Any, path: str) -> list[np.ndarray]:
    """The optimizer's variables of a file, as plain Keras reads them."""
    del strategy
    return [np.asarray(v) for v in keras.models.load_model(path).optimizer.variables]


def another_optimizer(strategy: Any, first: str, second: str) -> str:
    """The error of a model that is trained with one optimizer and then with another."""
    model, _ = _fit(strategy, OPTIMIZERS[first])
    return common.error_of(lambda: _fit(strategy, OPTIMIZERS[second], model))


def one_weight(strategy: Any) -> str:
    """The error of fewer weights than processes."""
    with scope(strategy):
        model = _with_given_weights(keras.layers.Dense(3, use_bias=False))
    return common.error_of(lambda: _fit(strategy, OPTIMIZERS["lamb"], model))


def infinity_in_one_shard(strategy: Any, of_whole_weights: bool = False) -> dict[str, Any]:
    """A scaled loss overflows in the gradients of one row of the only kernel."""

    def optimizer() -> Any:
        inner = keras.optimizers.SGD(0.01, momentum=0.9)
        inner = keras.optimizers.Lamb(0.01) if of_whole_weights else inner
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**20)

    with scope(strategy):
        model = _with_given_weights(keras.layers.Dense(3))
    model, _ = _fit(strategy, optimizer, model, scale=1e35)
    return {
        "weights": common.weights(model),
        "scale": float(model.optimizer.dynamic_scale.numpy()),
        "iterations": int(model.optimizer.inner_optimizer.iterations.numpy()),
    }


def whole_weights(strategy: Any) -> dict[str, Any]:
    """Constraints, weights without decay, and weights that the program sets between two fits."""
    with scope(strategy):
        constraint = keras.constraints.MaxNorm(0.8)
        model = _with_given_weights(
            keras.layers.Dense(16, "tanh", kernel_constraint=constraint),
            keras.layers.Dense(16, "tanh", name="free"),
            keras.layers.Dense(3),
        )

    def optimizer() -> Any:
        made = keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.05)
        made.exclude_from_weight_decay([model.get_layer("free").kernel], ["bias"])
        return made

    _fit(strategy, optimizer, model)
    with scope(strategy):
        model.set_weights([0.5 * each for each in model.get_weights()])
    _, history = _fit(strategy, lambda: model.optimizer, model)
    return {"weights": common.weights(model), "loss": history.history["loss"]}


def read_on_one(strategy: Any) -> str:
    """The error of a program that reads the optimizer's state on the chief only."""
    model, _ = _fit(strategy, OPTIMIZERS["adam"])
    divided = next(v for v in model.optimizer.variables if hasattr(v, "shard"))
    try:
        if rank(strategy) == 0:
            np.asarray(divided)
        else:
            model.save_weights("/nowhere/never.weights.h5")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tied(strategy: Any) -> dict[str, Any]:
    """A table that is looked up and, transposed, computes the logits; ids that come twice."""

    class Tied(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            seeded = keras.initializers.RandomNormal(0.0, 0.3, seed=3)
            self.table = keras.layers.Embedding(10, 6, embeddings_initializer=seeded)

        def call(self, ids: Any) -> Any:
            mixed = keras.ops.mean(self.table(ids), axis=1)
            return keras.ops.matmul(mixed, keras.ops.transpose(self.table.embeddings))

    ids, _ = common.tokens(UNEVEN, vocabulary=10)
    with scope(strategy):
        model = Tied()
        model.compile(keras.optimizers.Adam(0.01), common.sparse_crossentropy())
        history = model.fit(ids, ids[:, 0], BATCH, 2, shuffle=False, verbose=0)
        return {"weights": common.weights(model), "loss": history.history["loss"]}


def clipped_rows(strategy: Any) -> dict[str, Any]:
    """Keras makes gradients of rows dense when it clips by the norm of all, not of each."""
    ids, labels = common.tokens(UNEVEN)
    result = {}
    for clipping in ("global_clipnorm", "clipnorm"):
        with scope(strategy):
            table = keras.layers.Embedding(20, 8, embeddings_initializer="ones")
            model = keras.Sequential([table, keras.layers.GlobalAveragePooling1D()])
            model.add(keras.layers.Dense(2, kernel_initializer="zeros"))
            optimizer = keras.optimizers.Adam(0.01, **{clipping: 0.05})
            model.compile(optimizer, common.sparse_crossentropy())
            model.fit(ids, labels, BATCH, 2, shuffle=False, verbose=0)
            result[clipping] = common.weights(model)
    return result


def regularized(strategy: Any) -> dict[str, Any]:
    """Losses of weights, which are read outside of a layer's call, and a layer that is shared."""
    with scope(strategy):
        shared = keras.layers.Dense(8, "tanh", kernel_regularizer="l2")
        model = _with_given_weights(
            shared, keras.layers.Dropout(0.0), shared, keras.layers.Dense(3)
        )
    model, history = _fit(strategy, lambda: keras.optimizers.SGD(0.1), model)
    return {"weights": common.weights(model), "loss": history.history["loss"]}


def traced_readings(strategy: Any) -> list[int]:
    """How many gatherings are traced when all weights are read for the first and second time."""
    with scope(strategy):
        # Of a size that no other case has, as functions are kept as long as the strategy.
        model = keras.Sequential([keras.Input((22,)), *(keras.layers.Dense(22) for _ in range(4))])
    counts = []
    for _ in range(2):
        with mock.patch.object(variables, "gather", wraps=variables.gather) as gather:
            model.get_weights()
        counts.append(gather.call_count)
    return counts


def assigned_by_value(strategy: Any) -> list[np.ndarray]:
    """Weights that are assigned through their values, which are TensorFlow's variables in Keras."""
    model, _ = _fit(strategy, OPTIMIZERS["adam"])
    for weight in [*model.weights, *model.optimizer.variables[2:]]:
        weight.value.assign(0.5 * weight.value)
        weight.value.assign_add(tf.ones(weight.shape))
        weight.value.assign_sub(0.25 * tf.ones(weight.shape))
    return [*common.weights(model), *map(np.asarray, model.optimizer.variables[2:])]


class Loop(keras.layers.Layer):
    """Calls layers in a loop and, of its steps, in a branch; another is called step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.other, self.last = (keras.layers.Dense(8, "tanh") for _ in range(3))

    def build(self, shape: Any) -> None:
        for each in (self.dense, self.other):
            each.build((None, 8))

    def call(self, x: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            layers = (lambda: self.dense(h)), (lambda: self.other(h))
            return i + 1, tf.cond(i % 2 > 0, *layers) + x

        shapes = [tf.TensorShape([]), tf.TensorShape([None, 8])]
        _, h = tf.while_loop(lambda i, _: i < 4, body, [0, x], shape_invariants=shapes)
        return tf.map_fn(self.last, tf.stack([h, x]))[1] + h


def within_control_flow(strategy: Any) -> dict[str, Any]:
    """Layers that are called within loops and branches, also before they are built."""
    with scope(strategy):
        keras.utils.set_random_seed(6)
        steps = keras.layers.Reshape((2, 4))
        model = keras.Sequential([Loop(), steps, keras.layers.GRU(8), keras.layers.Dense(3)])
    model, history = _fit(strategy, OPTIMIZERS["adam"], model)
    return {"weights": common.weights(model), "loss": history.history["loss"]}


class Centred(keras.Model):
    """Gives a kernel a value by the examples, and trains it in the same step."""

    def __init__(self, in_branch: bool = False) -> None:
        super().__init__()
        self.in_branch = in_branch
        self.dense = keras.layers.Dense(8, "tanh")
        self.last = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.last(self.dense(x))

    def train_step(self, data: Any) -> Any:
        mean = tf.reduce_mean(data[0], 0)[:, None]
        logs = super().train_step(data)
        if self.in_branch:
            tf.cond(mean[0, 0] < 1e9, lambda: self.centre(mean), lambda: None)
        else:
            self.centre(mean)
        return logs

    def centre(self, mean: Any) -> None:
        self.dense.kernel.assign(0.9 * self.dense.kernel - 0.1 * mean)


def centred(strategy: Any) -> dict[str, Any]:
    """A weight that is trained, and that a step assigns by its examples."""
    with scope(strategy):
        keras.utils.set_random_seed(8)
        model = Centred()
    model, history = _fit(strategy, OPTIMIZERS["adam"], model)
    return {"weights": common.weights(model), "loss": history.history["loss"]}


def centred_in_branch(strategy: Any) -> list[str]:
    """The warnings of a step that does so in a branch."""
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(strategy, OPTIMIZERS["adam"], Centred(in_branch=True))
    return [str(each.message) for each in caught]


class Computing(keras.Model):
    """Computes with its gradients: clips them, updates a weight by hand, or logs their norm."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dense, self.last = keras.layers.Dense(4), keras.layers.Dense(3)
        self.kind = kind

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.last.build([None, 4])
        self.sum = self.add_weight(shape=self.dense.kernel.shape, trainable=False, name="sum")

    def call(self, x: Any) -> Any:
        return self.last(self.dense(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        if self.kind == "jacobian":
            return {"loss": loss, "slope": tape.jacobian(loss, self.dense.kernel)[0, 0]}
        if self.kind == "curvature":
            [slope] = tf.gradients(loss, x)
            return {"loss": loss, "slope": tf.gradients(tf.norm(slope), self.dense.kernel)}
        gradients = tape.gradient(loss, self.trainable_weights)
        if self.kind == "sum":
            self.sum.assign_add(gradients[0])
        if self.kind == "update":
            self.dense.kernel.assign(self.dense.kernel - 0.1 * gradients[0])
            return {"loss": loss}
        norm = tf.linalg.global_norm(gradients) if self.kind == "norm" else None
        if self.kind == "clip":
            gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss} if norm is None else {"loss": loss, "norm": norm}


class Centring(keras.optimizers.SGD):
    """Takes the mean from each gradient."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply([g - keras.ops.mean(g) for g in grads], trainable_variables)


def computes_with_gradients(strategy: Any, kind: str) -> str:
    """The error of a step that computes with its gradients, or of such an optimizer."""
    with scope(strategy):
        model = (
            keras.Sequential([keras.layers.Dense(3)]) if kind == "optimizer" else Computing(kind)
        )
    kind_of = Centring if kind == "optimizer" else keras.optimizers.SGD
    return common.error_of(lambda: _fit(strategy, lambda: kind_of(0.1), model))


class Mapping(keras.layers.Layer):
    """Calls a layer on each example by itself."""

    def build(self, shape: Any) -> None:
        self.dense = keras.layers.Dense(8)
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return tf.vectorized_map(lambda row: self.dense(row[None])[0], x)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def mapped_by_example(strategy: Any) -> str:
    """The error of a layer that is called within `tf.vectorized_map`."""
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), Mapping(), keras.layers.Dense(3)])
    return common.error_of(lambda: _fit(strategy, OPTIMIZERS["adam"], model))


def saved_by_tensorflow(strategy: Any) -> str:
    """The error of `tf.saved_model.save`."""
    model, _ = _fit(strategy, OPTIMIZERS["adam"])
    return common.error_of(lambda: tf.saved_model.save(model, "/nowhere"))


def weights_held(strategy: Any) -> dict[str, Any]:
    """The numbers of each weight, and those that this process keeps of it."""
    model, _ = _fit(strategy, OPTIMIZERS["adam"])

    try:
        model.export("/nowhere")
        exported = ""
    except Exception as error:
        exported = str(error)
    return {
        "exported": exported,
        "whole": [int(np.prod(v.shape)) for v in model.weights],
        "here": [int(np.prod(getattr(v, "shard", v).shape)) for v in model.weights],
    }


def generated(strategy: Any) -> dict[str, Any]:
    """What functions outside of steps compute with a model, before and after it is trained on."""
    model, _ = _fit(strategy, OPTIMIZERS["adam"])
    start = tf.constant(common.table(6)[0])

    @tf.function
    def step(x: Any) -> Any:
        return tf.concat([x[:, 3:], tf.nn.softmax(model(x))], 1)

    @tf.function
    def generate(x: Any) -> Any:
        for _ in tf.range(4):
            x = step(x)
        return x + tf.reduce_sum(model.weights[0])

    results = [generate(start).numpy()]
    _fit(strategy, OPTIMIZERS["adam"], model)
    results.append(generate(start).numpy())
    for weight in model.weights:
        weight.assign(0.5 * weight)
    return {"generated": [*results, generate(start).numpy()], "slope": _slope(model, start)}


def _slope(model: keras.Model, x: Any) -> Any:
    """A gradient of inputs, which is taken outside of any step."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(model(x)[:, 0])
    return tape.gradient(total, x).numpy()


def outside_of_steps(strategy: Any, kind: str, compiled: bool) -> str:
    """The error of what needs a whole weight in each process, outside of any step."""
    model, _ = _fit(strategy, OPTIMIZERS["adam"])
    x, kernel = tf.constant(common.table(6)[0]), model.weights[0]

    def slopes() -> Any:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(model(x))
        return tape.gradient(total, model.trainable_weights)

    called = tf.function(lambda row: model(row[None]))

    def mapped() -> Any:
        called(x[0])
        return next(iter(tf.data.Dataset.from_tensor_slices(x).map(called)))

    functions: dict[str, Callable[[], Any]] = {
        "gradient": slopes,
        "assigned": lambda: kernel.assign(2 * kernel),
        "mapped": mapped,
    }
    function = functions[kind]
    try:
        with scope(strategy):
            (tf.function(function, autograph=False) if compiled else function)()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
