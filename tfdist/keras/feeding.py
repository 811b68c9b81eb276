"""Batches that carry their share: how many examples a replica holds, and how many there are.

Keras's own data sets go through a strategy's `experimental_distribute_dataset`, as those of loops
written by hand do. Only for Keras the slices are wrapped in `Slice`, which `Strategy.run` takes off
again before the model sees them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tfdist.keras.hooks import Hook

_local = threading.local()


def hooks() -> list[Hook]:
    """The seam at which Keras distributes its data sets."""
    return [Hook(TFEpochIterator, "__init__", _for_keras)]


def is_feeding_keras() -> bool:
    """Whether the data set that is being distributed goes to a Keras trainer."""
    return getattr(_local, "iterator", None) is not None


def batches_by_keras() -> int | None:
    """How many batches Keras knows the data set to have, such as one of arrays, or None."""
    iterator = getattr(_local, "iterator", None)
    return None if iterator is None else iterator.data_adapter.num_batches


def _for_keras(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _local.iterator = self
        try:
            original(self, *args, **kwargs)
        finally:
            _local.iterator = None

    return init
