"""The models in Keras, for the peers on TensorFlow."""

from __future__ import annotations

from typing import Any

import keras

from bench.pair.data import CLASSES, LEARNING_RATES, initial_weights, judged
from bench.pair.job import Workload

__all__ = ["LOSS", "build", "judge"]

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_layers = keras.layers


def build(workload: Workload) -> tuple[Any, Any]:
    """The model, with its initial weights, and its optimizer."""
    if len(workload.shape) == 1:
        hidden = [_layers.Dense(1536, activation="relu") for _ in range(2)]
    else:
        hidden = [
            _layers.Conv2D(32, 3, activation="relu"),
            _layers.MaxPooling2D(),
            _layers.Conv2D(64, 3, activation="relu"),
            _layers.MaxPooling2D(),
            _layers.Flatten(),
        ]
    model = keras.Sequential([keras.Input(workload.shape), *hidden, _layers.Dense(CLASSES)])
    model.set_weights(initial_weights(workload))
    makers = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}
    return model, makers[workload.optimizer](LEARNING_RATES[workload.optimizer])


def judge(workload: Workload, weights: Any) -> float:
    """The loss with these weights, computed by this process alone."""
    model, _ = build(workload)
    model.set_weights(weights)
    features, labels = judged(workload)
    return float(LOSS(labels, model(features, training=False)))
