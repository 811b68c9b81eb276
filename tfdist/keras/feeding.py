"""Batches that carry their share: how many examples a replica holds, and how many there are.

Keras's own data sets go through a strategy's `experimental_distribute_dataset`, as those of loops
written by hand do. Only for Keras the slices are wrapped in `Slice`, which `Strategy.run` takes off
again before the model sees them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._keras import GeneratorDataAdapter, TensorFlowTrainer, TFEpochIterator
from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.comm.batch_sharding import policy_of, split_in_words
from tfdist.keras.hooks import Hook, fitting
from tfdist.types import DataAdapter, EpochIterator, Model
from tfdist.utils.messages import logger

_local = threading.local()


def hooks() -> list[Hook]:
    """The seams at which Keras distributes its data sets, and learns for how many epochs."""
    return [
        Hook(TFEpochIterator, "__init__", _for_keras, priority=2),
        Hook(TensorFlowTrainer, "fit", _note_epochs, priority=2),
    ]


def is_feeding_keras() -> bool:
    """Whether the data set that is being distributed goes to a Keras trainer."""
    return getattr(_local, "iterator", None) is not None


def batches_by_keras() -> int | None:
    """The number of batches of a data set, such as one of arrays, if Keras knows it, or None."""
    iterator = getattr(_local, "iterator", None)
    return None if iterator is None else iterator.data_adapter.num_batches


def no_more_than_read(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A data set of no more batches than Keras will read, if it will stop before the end.

    A strategy reads ahead. A data set that is shuffled again and again, and is used by a second
    `fit`, would go on with another order than on one device if more of it were read. And the
    workers would each read another number of batches of a generator, which goes on from there when
    it validates the next epoch.
    """
    iterator = getattr(_local, "iterator", None)
    if iterator is None or not iterator.steps_per_epoch:
        return dataset
    calls = -(-iterator.steps_per_epoch // iterator.steps_per_execution)
    count = calls * iterator.steps_per_execution * iterator._tfdist_epochs
    if isinstance(iterator.data_adapter, GeneratorDataAdapter):
        # Before Keras itself reads ahead.
        generate = iterator.data_adapter.generator
        iterator.data_adapter.generator = lambda: itertools.islice(generate(), count)
    return dataset.take(count)


def global_batch() -> int | None:
    """The examples of a full batch of the `fit` that runs; None if its data set does not show it.

    The first iterator that `fit` makes is that of the training.
    """
    iterator = getattr(_local, "training", None)
    if isinstance(iterator, TFEpochIterator):
        _local.training = 0
        with contextlib.suppress(Exception):  # A training does not fail for its record.
            _local.training = _full_batch(iterator.data_adapter)
    return getattr(_local, "training", None) or None


def _note_epochs(original: Callable[..., Any]) -> Callable[..., Any]:
    """A strategy may read ahead as many batches as all epochs take."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Model, *args: object, **kwargs: object) -> object:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        epochs = bound.arguments["epochs"] - (bound.arguments["initial_epoch"] or 0)
        before = getattr(_local, "epochs", 1)
        _local.epochs, _local.training = max(epochs, 1), None
        try:
            return original(self, *args, **kwargs)
        finally:
            _local.epochs, _local.training = before, None

    return fit


def _for_keras(original: Callable[..., None]) -> Callable[..., None]:
    """Keras shards data sets by files or not at all, and cannot divide uneven batches."""

    @functools.wraps(original)
    def init(self: EpochIterator, *args: object, **kwargs: object) -> None:
        _local.iterator = self
        # The first one that `fit` makes is read on from epoch to epoch; others are not.
        self._tfdist_epochs, _local.epochs = getattr(_local, "epochs", 1), 1
        try:
            original(self, *args, **kwargs)
        finally:
            _local.iterator = None
        if fitting.is_up and getattr(_local, "training", None) is None:
            _local.training = self
        _say_batch(self)

    return init


#: Strategies that have reported how they split a batch.
_said: weakref.WeakSet[Any] = weakref.WeakSet()


def _say_batch(iterator: EpochIterator) -> None:
    """Shows the user, at the first `fit`, how its batches are split."""
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    if not fitting.is_up or replicas == 1 or strategy in _said:
        return
    _said.add(strategy)
    batch = _first_batch(iterator.data_adapter)
    if batch and getattr(strategy, "is_chief", True):
        parts = split_in_words(batch, replicas)
        logger.info(f"global batch: {batch} examples a step → {parts}")


def _first_batch(adapter: DataAdapter) -> int | None:
    """The size of the first global batch: that of all, but of a single one that is not full."""
    size = _batch_size(adapter)
    return adapter.partial_batch_size or size if adapter.num_batches == 1 else size


def _batch_size(adapter: DataAdapter) -> int | None:
    """The size of a global batch that is sliced, if it is known before one is read."""
    dataset = getattr(adapter, "_dataset", None)
    if not isinstance(dataset, tf.data.Dataset):
        return None if dataset is not None else adapter.batch_size
    if policy_of(dataset).name not in ("AUTO", "DATA"):
        return None
    specs = tf.nest.flatten(dataset.element_spec)
    sizes = {s.shape[0] for s in specs if isinstance(s, tf.TensorSpec) and s.shape.rank}
    return sizes.pop() if len(sizes) == 1 else None


def _full_batch(adapter: DataAdapter) -> int:
    """The size of a global batch, or 0: it may depend on the examples, or be a worker's part."""
    dataset = getattr(adapter, "_dataset", None)
    size = _batch_size(adapter)
    if size is None and isinstance(dataset, tf.data.Dataset):
        if policy_of(dataset).name not in ("AUTO", "DATA"):
            return 0
        with eagerly_outside_of_scope(), tf.device("CPU:0"):
            variant = tf.data.experimental.to_variant(dataset)
            size = int(tf.raw_ops.ComputeBatchSize(input_dataset=variant))
    return max(size or 0, 0)
