"""Batches that carry their share: how many examples a replica holds, and how many there are.

Keras's own data sets go through a strategy's `experimental_distribute_dataset`, as those of loops
written by hand do. Only for Keras the slices are wrapped in `Slice`, which `Strategy.run` takes off
again before the model sees them.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tfdist.data import policy_of, split_in_words
from tfdist.keras.flags import fitting
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
        _say_batch(self)

    return init


#: Strategies that have said how they split a batch.
_said: weakref.WeakSet[Any] = weakref.WeakSet()


def _say_batch(iterator: Any) -> None:
    """Tells the user, at the first `fit`, how its batches are split."""
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    if not fitting.is_up or replicas == 1 or strategy in _said:
        return
    _said.add(strategy)
    batch = _batch_size(iterator.data_adapter)
    if batch and getattr(strategy, "is_chief", True):
        print(
            f"tfdist: global batch: {batch} → {split_in_words(batch, replicas)} examples a step",
            file=sys.stderr,
            flush=True,
        )


def _batch_size(adapter: Any) -> int | None:
    """The size of a global batch that is sliced, where it is known before one is read."""
    dataset = getattr(adapter, "_dataset", None)
    if not isinstance(dataset, tf.data.Dataset):
        return None if dataset is not None else adapter.batch_size
    if policy_of(dataset).name not in ("AUTO", "DATA"):
        return None
    specs = tf.nest.flatten(dataset.element_spec)
    sizes = {s.shape[0] for s in specs if isinstance(s, tf.TensorSpec) and s.shape.rank}
    return sizes.pop() if len(sizes) == 1 else None
