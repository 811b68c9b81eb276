"""The models in Keras, for the peers on TensorFlow."""

from __future__ import annotations

import functools
from typing import Any

import keras

from bench.pair.data import (
    BLOCKS,
    HEADS,
    LEARNING_RATES,
    TOKENS,
    WIDTH,
    initial_weights,
    judged,
)
from bench.pair.job import CLASSES, Workload

__all__ = ["LOSS", "build", "judge", "loss_of"]


def loss_of(library: Any) -> Any:
    """The loss, mean over a batch."""
    return library.losses.SparseCategoricalCrossentropy(from_logits=True)


LOSS = loss_of(keras)


def build(workload: Workload, library: Any = keras) -> tuple[Any, Any]:
    """The model, with its initial weights, and its optimizer.

    Args:
        workload: the workload.
        library: `keras` or `tf_keras`.
    """
    makers = {
        "mlp": functools.partial(_mlp, workload.hidden),
        "convnet": _convnet,
        "transformer": _transformer,
    }
    dtype = "int32" if workload.kind == "transformer" else None
    inputs = library.Input(workload.shape, dtype=dtype)
    hidden = makers[workload.kind](library.layers, inputs)
    model = library.Model(inputs, library.layers.Dense(CLASSES)(hidden))
    model.set_weights(initial_weights(workload))
    optimizers = {"adam": library.optimizers.Adam, "sgd": library.optimizers.SGD}
    return model, optimizers[workload.optimizer](LEARNING_RATES[workload.optimizer])


def _mlp(widths: tuple[int, ...], layers: Any, x: Any) -> Any:
    for width in widths:
        x = layers.Dense(width, activation="relu")(x)
    return x


def _convnet(layers: Any, x: Any) -> Any:
    for filters in (32, 64):
        x = layers.MaxPooling2D()(layers.Conv2D(filters, 3, activation="relu")(x))
    return layers.Flatten()(x)


def _transformer(layers: Any, x: Any) -> Any:
    x = layers.Embedding(TOKENS, WIDTH)(x)
    for _ in range(BLOCKS):
        normal = layers.LayerNormalization(epsilon=1e-5)(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normal, normal)])
        normal = layers.LayerNormalization(epsilon=1e-5)(x)
        wide = layers.Dense(4 * WIDTH, activation="gelu")(normal)
        x = layers.Add()([x, layers.Dense(WIDTH)(wide)])
    return layers.GlobalAveragePooling1D()(x)


def judge(workload: Workload, weights: Any) -> float:
    """The loss with these weights, computed by this process alone."""
    model, _ = build(workload)
    model.set_weights(weights)
    features, labels = judged(workload)
    return float(LOSS(labels, model(features, training=False)))
