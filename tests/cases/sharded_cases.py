"""Cases of sharded checkpoints, on a directory that all processes share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tests.cases import common, mesh_cases
from tests.cases.common import BATCH, scope
from tests.cases.harness_cases import rank


@contextlib.contextmanager
def _sharded(strategy: Any) -> Iterator[None]:
    """The strategy's scope, in which files are sharded."""
    with scope(strategy):
        if strategy is not None:
            strategy.checkpoints = "sharded"
        try:
            yield
        finally:
            if strategy is not None:
                strategy.checkpoints = "whole"


def _made(policy: str = "float32") -> tuple[keras.Model, Any]:
    """A compiled model with a normalization, whose statistics are whole everywhere."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(0)
        x, y = common.tokens(common.UNEVEN)
        inputs = keras.Input((6,), dtype="int32")
        hidden = keras.layers.Embedding(20, 8)(inputs)
        hidden = hidden + keras.layers.MultiHeadAttention(2, 4)(hidden, hidden)
        hidden = keras.layers.Dense(16, "relu")(keras.layers.BatchNormalization()(hidden))
        hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(8)(hidden))
        model = keras.Model(inputs, keras.layers.Dense(2, dtype="float32")(hidden))
        model.compile(mesh_cases.adam(), common.sparse_crossentropy(), metrics=["accuracy"])
        return model, (x, y)
    finally:
        keras.config.set_dtype_policy(before)


def _state(model: keras.Model) -> dict[str, Any]:
    return {
        "weights": [np.float32(each) for each in common.weights(model)],
        "optimizer": [np.float32(v.numpy()) for v in model.optimizer.variables],
    }


def _fit(model: keras.Model, data: Any, epochs: int, **options: Any) -> Any:
    return model.fit(*data, BATCH, epochs, shuffle=False, verbose=0, **options)


def saved(strategy: Any, path: str, policy: str = "float32", epochs: int = 1) -> dict[str, Any]:
    """Trains and saves the model, and its weights alone, twice over each other."""
    with _sharded(strategy):
        model, data = _made(policy)
        weights = keras.callbacks.ModelCheckpoint(f"{path}/w.weights.h5", save_weights_only=True)
        _fit(model, data, epochs, callbacks=[weights])
        model.save(f"{path}/model.keras")
        before = sorted(os.listdir(f"{path}/model.keras"))
        model.save(f"{path}/model.keras")
        state = _state(model)
    files = {each: os.path.getsize(f"{path}/model.keras/{each}") for each in before if 0}
    after = sorted(os.listdir(f"{path}/model.keras"))
    return {**state, "before": before, "after": after, "files": files}


def loaded(strategy: Any, path: str) -> dict[str, Any]:
    """The state of the model, and of a new one with the weights; and after an epoch more."""
    with scope(strategy):
        model = keras.models.load_model(f"{path}/model.keras")
        other, data = _made()
        other.optimizer.build(other.trainable_variables)
        other.load_weights(f"{path}/w.weights.h5")
        result = {"model": _state(model), "weights": _state(other)}
        history = _fit(model, data, 1)
        return {**result, "on": {**_state(model), "loss": history.history["loss"]}}


def refused(strategy: Any, path: str) -> str:
    """The error of loading a model."""
    with scope(strategy):
        try:
            keras.models.load_model(path)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def is_chief(strategy: Any) -> bool:
    """Whether this process is the chief."""
    return rank(strategy) == 0
