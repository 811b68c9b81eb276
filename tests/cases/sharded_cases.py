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
from tfdist.comm import host_collectives

#: Two batches of 32 and one of 13.
EXAMPLES = 77


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
        x, y = common.tokens(EXAMPLES)
        inputs = keras.Input((6,), dtype="int32")
        hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 8)(inputs))
        hidden = keras.layers.Dense(16, "relu")(keras.layers.BatchNormalization(synchronized=True)(hidden))
        hidden = keras.layers.Dense(8)(hidden)
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
    after = sorted(os.listdir(f"{path}/model.keras"))
    processes = host_collectives.worker_count(strategy)
    return {**state, "before": before, "after": after, "processes": processes}


def uninterrupted(strategy: Any, policy: str = "float32") -> dict[str, Any]:
    """The state after the epoch before the save and the one after it, and the latter's loss."""
    with scope(strategy):
        model, data = _made(policy)
        _fit(model, data, 1)
        history = _fit(model, data, 1)
        return {**_state(model), "loss": history.history["loss"]}


def loaded(strategy: Any, path: str, policy: str = "float32") -> dict[str, Any]:
    """The state of the model, and of a new one with the weights; and after an epoch more."""
    with scope(strategy):
        model = keras.models.load_model(f"{path}/model.keras")
        other, data = _made(policy)
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
