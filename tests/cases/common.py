"""What cases share: made data, small models, and the report that tests compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

#: 9 batches of 32 and one of 13 an epoch; two replicas get 7 and 6 of the last.
UNEVEN = 301
#: 9 batches of 32 and one of a single example: fewer than there are replicas.
ONE_LEFT = 289
BATCH = 32


def scope(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    """The strategy's scope; nothing for stock Keras."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def table(examples: int, features: int = 8, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Features and classes that depend on them."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(examples, features)).astype("float32")
    hidden = np.tanh(x @ rng.normal(size=(features, classes)))
    return x, hidden.argmax(1).astype("int32")


def images(examples: int, size: int = 8, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Small noisy images with a stripe where the class says."""
    rng = np.random.default_rng(2)
    y = rng.integers(0, classes, examples).astype("int32")
    x = rng.normal(size=(examples, size, size, 1)).astype("float32")
    for image, label in zip(x, y, strict=True):
        image[2 * label : 2 * label + 2] += 1.5
    return x, y


def tokens(examples: int, length: int = 6, vocabulary: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Token sequences of unequal lengths, padded with 0; the class is the first token's parity."""
    rng = np.random.default_rng(3)
    x = rng.integers(1, vocabulary, (examples, length)).astype("int32")
    lengths = rng.integers(1, length + 1, examples)
    x[np.arange(length)[None] >= lengths[:, None]] = 0
    return x, (x[:, 0] % 2).astype("int32")


def dense_model() -> keras.Model:
    """Two dense layers for `table`."""
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
    )


def lazy_model() -> keras.Model:
    """The same without an Input: built by its first batch."""
    return keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])


def wide_model() -> keras.Model:
    """A kernel of 2 MiB between small weights, for `table`: its gradient travels by itself."""
    widths = [keras.layers.Dense(width, "relu") for width in (1024, 512)]
    return keras.Sequential([keras.Input((8,)), *widths, keras.layers.Dense(3)])


def conv_model(synchronized: bool = True) -> keras.Model:
    """Convolution and batch normalization for `images`.

    The convolution has no bias: before a normalization its gradient is zero but for noise, which
    Adam blows up.
    """
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(synchronized=synchronized),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )


def embedding_model() -> keras.Model:
    """An embedding, whose gradients are sparse, for `tokens`."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(20, 8),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2),
        ]
    )


class _Positions(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(6, 8)

    def call(self, inputs: Any) -> Any:
        """Adds an embedding of each position: a lookup that does not depend on the batch."""
        return inputs + self.embedding(keras.ops.arange(6))


def position_model() -> keras.Model:
    """Embeddings of tokens and of positions."""
    layers = keras.layers
    hidden = _Positions()(layers.Embedding(20, 8)(inputs := keras.Input((6,), dtype="int32")))
    hidden = layers.Dense(8, "relu")(hidden)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))


MODELS = {
    "dense": (dense_model, table),
    "lazy": (lazy_model, table),
    "wide": (wide_model, table),
    "conv": (conv_model, images),
    "embedding": (embedding_model, tokens),
    "position": (position_model, tokens),
}


def sparse_crossentropy(**kwargs: Any) -> keras.losses.Loss:
    """The classifiers' loss."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def weights(model: keras.Model) -> list[np.ndarray]:
    """All weights of a model, metrics excluded."""
    return [np.asarray(w) for w in model.get_weights()]


def history(result: Any) -> dict[str, list[float]]:
    """What `fit` returned, as plain floats."""
    return {name: [float(v) for v in values] for name, values in sorted(result.history.items())}


def numbers(logs: dict[str, Any]) -> dict[str, float]:
    """Logs as plain floats."""
    return {name: float(value) for name, value in sorted(logs.items())}


def fitted(model: keras.Model, *data: Any, **options: Any) -> dict[str, Any]:
    """The history and the weights of two epochs, or as `options` of `fit` say.

    Args:
        model: a compiled model.
        data: features and labels, or a data set of batches.
        options: of `fit`.
    """
    batches = {"batch_size": BATCH, "shuffle": False} if len(data) > 1 else {}
    done = model.fit(*data, **{"epochs": 2, "verbose": 0, **batches, **options})
    return {"history": history(done), "weights": weights(model)}


def score(model: keras.Model, *data: Any, **options: Any) -> dict[str, float]:
    """The results of `evaluate`; for the arguments see `fitted`."""
    batches = {"batch_size": BATCH} if len(data) > 1 else {}
    options = {"verbose": 0, "return_dict": True, **batches, **options}
    return numbers(model.evaluate(*data, **options))


def _optimizers_by_name() -> keras.optimizers.Optimizer:
    adam, sgd = keras.optimizers.Adam(0.02, epsilon=1e-3), keras.optimizers.SGD(0.05)
    return keras.optimizers.MultiOptimizer(lambda v: adam if "kernel" in v.path else sgd)


def make_optimizer(name: str, **options: Any) -> keras.optimizers.Optimizer:
    """An optimizer by a short name."""
    kinds: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "sgd": (keras.optimizers.SGD, {"learning_rate": 0.1}),
        "momentum": (keras.optimizers.SGD, {"learning_rate": 0.05, "momentum": 0.9}),
        "adam": (keras.optimizers.Adam, {"learning_rate": 0.01}),
        "adamw": (keras.optimizers.AdamW, {"learning_rate": 0.01, "weight_decay": 0.05}),
        "nadam": (keras.optimizers.Nadam, {"learning_rate": 0.01, "epsilon": 1e-3}),
        "schedule_free": (
            keras.optimizers.ScheduleFreeAdamW,
            {"learning_rate": 0.02, "epsilon": 1e-3},
        ),
        "several": (_optimizers_by_name, {}),
    }
    kind, defaults = kinds[name]
    return kind(**{**defaults, **options})


@keras.saving.register_keras_serializable("tfdist_tests")
class SeenOnce(keras.metrics.Metric):
    """Share of the ids 0 … n-1 that were met exactly once since the last reset.

    The result is no mean over batches: it is right only if all replicas' states are put together.
    """

    def __init__(self, examples: int, name: str = "once", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.examples = examples
        self.seen = self.add_weight(shape=(examples,), initializer="zeros", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Counts the ids in `y_true`, of shape (batch,) or (batch, 1)."""
        del y_pred, sample_weight
        ids = keras.ops.reshape(keras.ops.cast(y_true, "int32"), (-1,))
        hits = keras.ops.sum(keras.ops.one_hot(ids, self.examples), axis=0)
        self.seen.assign_add(hits)

    def result(self) -> Any:
        """The share, a scalar."""
        once = keras.ops.equal(keras.ops.round(self.seen.value), 1.0)
        return keras.ops.mean(keras.ops.cast(once, "float32"))


def error_of(action: Callable[[], object]) -> str:
    """The error that an action ends in, with its type; empty if it ends in none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
