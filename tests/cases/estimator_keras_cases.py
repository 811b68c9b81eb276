"""Keras models as Estimators: called in a worker process of the harness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases.common import table
from tests.cases.estimator_canned_cases import values_of
from tfdist import estimator
from tfdist.errors import ConfigError
from tfdist.estimator.keras_variables import changed

tf1 = tf.compat.v1
layers = keras.layers

BATCH = 16

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9), global_clipnorm=0.5
    ),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=4),
    "accumulating": lambda: keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=3),
}


class Centred(layers.Layer):
    """Reads the moving mean that it has just assigned, which has no gradient to the batch."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(x, axis=0))
        return x - self.mean


def _model(optimizer: Any, centred: bool = False) -> Any:
    """All that has state: normalization, random numbers; and losses of its own."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(12, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3)),
            layers.BatchNormalization(),
            *([Centred()] if centred else []),
            layers.Dropout(0.3),
            layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(1.0)),
        ]
    )
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
    )
    return model


def _fed(x: Any, y: Any = None, size: int = BATCH) -> Callable[[], Any]:
    def input_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices(x if y is None else (x, y)).batch(size)

    return input_fn


def _differences(model: Any, values: dict[str, Any]) -> dict[str, float]:
    """How far a model's variables are from those of a checkpoint, by their paths."""
    return {
        variable.path: float(np.abs(variable.numpy() - values[variable.path]).max())
        for variable in [*model.variables, *model.optimizer.variables]
        if variable.path in values and variable.dtype != "uint32"
    }


def fitted(_: Any, path: str, optimizer: str, times: int) -> dict[str, Any]:
    """An Estimator and the model itself, trained on the same uneven batches so many times."""
    x, y = table(88)
    model = _model(OPTIMIZERS[optimizer](), centred=True)
    if optimizer == "adamw":
        model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    before = model.get_weights()
    for _unused in range(times):  # The second goes on from the checkpoint, with another object.
        made = estimator.model_to_estimator(model, model_dir=path)
        made.train(_fed(x, y))
    kept = all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    predicted = np.concatenate([list(each.values()) for each in made.predict(_fed(x))])
    metrics = made.evaluate(_fed(x, y))
    for _unused in range(times):
        for start in range(0, len(x), BATCH):
            model.train_on_batch(x[start : start + BATCH], y[start : start + BATCH])
    return {
        "kept": kept,
        "differences": _differences(model, values_of(made)),
        "variables": len(model.variables) + len(model.optimizer.variables) + 1,
        "saved": len(values_of(made)),
        "predictions": float(np.abs(model.predict(x, verbose=0) - predicted).max()),
        "expected": model.evaluate(x, y, BATCH, verbose=0, return_dict=True),
        "metrics": metrics,
    }


def several(_: Any, path: str) -> dict[str, Any]:
    """A model with two inputs and outputs, from its file: resumed where it was, and exported."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(2)
    word, x = keras.Input((3,), dtype="int32", name="word"), keras.Input((8,), name="x")
    net = layers.concatenate([layers.Flatten()(layers.Embedding(50, 4)(word)), x])
    outputs = {
        "kind": layers.Dense(3, name="kind")(net),
        "size": layers.Dense(1, name="size")(net),
    }
    model = keras.Model({"word": word, "x": x}, outputs)
    kind = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        "adam", {"kind": kind, "size": "mse"}, {"kind": 1.0, "size": 0.5}, {"size": ["mae"]}
    )
    values, labels = table(64)
    rng = np.random.default_rng(0)
    features = {"x": values, "word": rng.integers(0, 50, (64, 3)).astype("int32")}
    targets = {"kind": labels, "size": values[:, :1] * 3}
    model.fit(features, targets, BATCH, 1, shuffle=False, verbose=0)
    model.save(f"{path}/model.keras")
    made = estimator.model_to_estimator(
        keras_model_path=f"{path}/model.keras",
        model_dir=f"{path}/m",
        metric_names_map={"size_mae": "error"},
    )
    made.train(_fed(features, targets))
    model.fit(features, targets, BATCH, 1, shuffle=False, verbose=0)
    with tf.Graph().as_default():
        placeholders = {
            "x": tf1.placeholder(tf.float32, [None, 8]),
            "word": tf1.placeholder(tf.int32, [None, 3]),
        }
        receiver = estimator.export.build_raw_serving_input_receiver_fn(placeholders)
    written = made.export_saved_model(f"{path}/saved", receiver).decode()
    signature = tf.saved_model.load(written).signatures["serving_default"]
    served = signature(**{key: tf.constant(value) for key, value in features.items()})
    expected = model.predict(features, verbose=0)
    return {
        "differences": _differences(model, values_of(made)),
        "metrics": made.evaluate(_fed(features, targets)),
        "expected": model.evaluate(features, targets, BATCH, verbose=0, return_dict=True),
        "served": {
            key: float(np.abs(served[key].numpy() - value).max()) for key, value in expected.items()
        },
    }


class Lazy(keras.Model):
    """A model that is built by its first batch, with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = layers.Dense(5, activation="tanh"), layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(self.dense(x["a"]))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        return keras.ops.mean(keras.ops.abs(y - y_pred) * 2)


def lazy(_: Any, path: str) -> dict[str, Any]:
    """Trains a model that was not built."""
    x, _unused = table(32)
    keras.utils.set_random_seed(3)
    model = Lazy()
    model.compile(keras.optimizers.SGD(0.05))
    made = estimator.model_to_estimator(model, model_dir=path)
    made.train(_fed({"a": x}, x[:, :1]))
    for start in range(0, 32, BATCH):
        model.train_on_batch({"a": x[start : start + BATCH]}, x[start : start + BATCH, :1])
    return {"differences": _differences(model, values_of(made))}


def on_servers(_: Any) -> dict[str, Any]:
    """Where variables and their updates are between-graph, and what an update is made of."""
    model = _model(OPTIMIZERS["sgd"]())
    made = estimator.model_to_estimator(model, model_dir="never-made")
    with tf.Graph().as_default() as graph, tf1.device(tf1.train.replica_device_setter(2)):
        tf1.train.get_or_create_global_step()
        made.call_model_fn(tf.zeros([4, 8]), tf.zeros([4], tf.int32), "train")
        places = {variable.op.name: variable.device for variable in tf1.global_variables()}
        updates = [
            (op.type, op.device, op.inputs[0].device)
            for op in graph.get_operations()
            if op.type.startswith("Assign") and "read_value" not in op.name
        ]
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("v", initializer=1.0)
        before = variable.read_value()
        with tf.control_dependencies([before]):
            other = variable.assign_add(5.0, read_value=False)
        with tf.control_dependencies([other]):
            update = changed(variable, before, before * 3)
        session.run(tf1.global_variables_initializer())
        session.run(update)
        together = float(session.run(variable))
    return {"places": places, "updates": updates, "together": together}


def refused(_: Any) -> dict[str, str]:
    """The messages of models that cannot be Estimators."""

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return {}

    def compiled(model: Any, **options: Any) -> Any:
        model.compile("sgd", "mse", **options)
        return model

    plain = [keras.Input((2,)), layers.Dense(1)]
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    x = np.zeros((2, 2), "float32")
    make = estimator.model_to_estimator

    def trained(model: Any, features: Any, labels: Any = None) -> None:
        make(model, model_dir="never-made").train(_fed(features, labels))

    cases: dict[str, Callable[[], Any]] = {
        "neither": make,
        "no model": lambda: make("model"),
        "uncompiled": lambda: make(keras.Sequential(plain)),
        "own": lambda: make(compiled(Own(plain))),
        "eagerly": lambda: make(compiled(keras.Sequential(plain), run_eagerly=True)),
        "format": lambda: make(compiled(keras.Sequential(plain)), checkpoint_format="checkpoint"),
        "labels": lambda: trained(compiled(keras.Sequential(plain)), x),
        "inputs": lambda: trained(compiled(keras.Sequential(plain)), {"p": x, "q": x}, x),
    }
    normed = [keras.Input((2,)), layers.SpectralNormalization(layers.Dense(1))]
    cases["assigned"] = lambda: trained(compiled(keras.Sequential(normed)), x, x[:, :1])
    scaled = keras.Sequential(plain)
    scaled.compile(scaling, "mse")
    cases["scaling"] = lambda: trained(scaled, x, x[:, :1])
    messages = {}
    for name, case in cases.items():
        try:
            case()
            messages[name] = "nothing"
        except ConfigError as error:
            messages[name] = str(error)
    return messages


def mirrored(_: Any, path: str) -> dict[str, Any]:
    """A Keras model, and an optimizer of Keras in a canned estimator, on one and two replicas."""
    x, y = table(64)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    results: dict[str, list[Any]] = {"keras": [], "canned": []}
    for chosen, size in ((None, 16), (strategy, 8)):
        config = estimator.RunConfig(train_distribute=chosen, eval_distribute=chosen)
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((8,)), layers.Dense(4, "relu"), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"])
        column = tf.feature_column.numeric_column("x", 8)
        made = {
            "keras": estimator.model_to_estimator(model, None, None, f"{path}/k{size}", config),
            "canned": estimator.LinearClassifier(
                [column],
                f"{path}/c{size}",
                n_classes=3,
                optimizer=keras.optimizers.Adam(0.1),
                config=config,
            ),
        }
        for name, each in made.items():
            each.train(_fed({"x": x}, y, size))
            metrics = each.evaluate(_fed({"x": x[:53]}, y[:53], size))
            metrics.pop("loss")  # Of batches, which have other sizes here.
            results[name].append({**values_of(each), **metrics})
    return {
        name: {key: float(np.abs(one[key] - two[key]).max()) for key in one}
        for name, (one, two) in results.items()
    }
