"""A model belongs to the strategy in whose scope it was made, also after the scope is left.

The usual program opens the scope around the making of the model only, and calls `fit` and `save`
outside of it. Models made in a scope therefore enter it again in the methods below, so that Keras
is hooked while they run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._keras import TensorFlowTrainer
from tfdist.keras.hooks import Hook
from tfdist.types import Model, Strategy

#: Methods of a model that run in its strategy's scope.
METHODS = (
    "compile",
    "evaluate",
    "export",
    "fit",
    "load_weights",
    "predict",
    "predict_on_batch",
    "save",
    "save_weights",
    "test_on_batch",
    "train_on_batch",
)


def hooks() -> list[Hook]:
    """The seam at which a model learns of its strategy."""
    return [Hook(TensorFlowTrainer, "__init__", _bind)]


def _bind(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Model, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        strategy = tf.distribute.get_strategy()
        for name in METHODS:
            if hasattr(type(self), name):
                object.__setattr__(self, name, _in_scope(self, name, strategy))

    return init


def _in_scope(model: Model, name: str, strategy: Strategy) -> Callable[..., Any]:
    method = getattr(type(model), name)

    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> Any:
        with strategy.scope():
            return getattr(type(model), name)(model, *args, **kwargs)

    return call
