"""The learning rate of one update, times a factor that the update mode asks for."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist._keras import BaseOptimizer
from tfdist.keras.hooks import Hook
from tfdist.types import KerasVariable, Optimizer, Scalar, Tensor

__all__ = ["hooks", "learning_rate_times"]

_local = threading.local()


def hooks() -> list[Hook]:
    """The seam at which an optimizer asks for its learning rate."""
    return [Hook(BaseOptimizer, "_get_current_learning_rate", _multiplied)]


@contextlib.contextmanager
def learning_rate_times(factor: Scalar | None) -> Iterator[None]:
    """Multiplies the learning rate of the update in the block; None leaves it."""
    before = getattr(_local, "factor", None)
    _local.factor = factor
    try:
        yield
    finally:
        _local.factor = before


def _multiplied(original: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of learning rates multiplies the rate that is used, not the one that is set."""

    @functools.wraps(original)
    def get_current_learning_rate(self: Optimizer) -> Tensor | KerasVariable:
        rate, factor = original(self), getattr(_local, "factor", None)
        return rate if factor is None else tf.cast(rate, tf.float32) * factor

    return get_current_learning_rate
