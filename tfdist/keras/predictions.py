"""`predict` and `predict_on_batch`: each replica takes its slice, and all get all rows.

A batch of fewer rows than there are replicas is not worth a slice: each process computes all of it
by itself and exchanges nothing. A program that generates text calls `predict` once for each token.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import types
from tfdist._keras import (
    EpochIterator,
    TensorFlowTrainer,
    TFEpochIterator,
    can_convert_arrays,
    convert_to_sliceable,
    tree,
)
from tfdist._keras import tensorflow_trainer as trainer
from tfdist._tf.distribute import local_results
from tfdist.comm import batch_sharding
from tfdist.keras.batches import Relaxed, as_values, spread
from tfdist.keras.hooks import Hook
from tfdist.keras.input_comparison import as_tensors, compare_values
from tfdist.keras.replica_step import gathers_rows, predicting, predicting_alone
from tfdist.keras.stateful import check_divided, is_stateful
from tfdist.types import DataAdapter, Model, Strategy, Structure

#: Keras's `batch_size` if none is given.
_BATCH = 32


def hooks() -> list[Hook]:
    """The seams of Keras's predictions."""
    return [
        Hook(TensorFlowTrainer, "predict_on_batch", _predict_on_batch),
        Hook(TensorFlowTrainer, "make_predict_function", _by_replicas),
        Hook(TFEpochIterator, "__init__", _without_pipeline, priority=1),
        Hook(trainer, "reduce_per_replica", _not_again),
    ]


class _Whole:
    """A batch of which each replica computes all rows.

    Attributes:
        batch: all rows, as a `Slice`.
    """

    def __init__(self, batch: Structure, rows: int) -> None:
        count = tf.constant(rows, tf.int64)
        self.batch = batch_sharding.Slice(as_tensors(batch), count, count)


def _divided(strategy: Strategy, batch: Structure) -> Structure | _Whole:
    """A batch of values in the form that a predict function takes."""
    values = as_values(batch)
    rows = batch_sharding.rows_of(values)
    if rows and rows < strategy.num_replicas_in_sync:
        return _Whole(values, rows)
    return spread(strategy, values)


def _predict_on_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras gives each replica the whole batch, and returns each row once for each."""

    @functools.wraps(original)
    def predict_on_batch(self: Model, x: Structure) -> Structure:
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync == 1:
            return original(self, x)
        self.make_predict_function()
        outputs = self.predict_function([_divided(strategy, (x,))])
        return tree.map_structure(lambda t: t.numpy() if hasattr(t, "numpy") else t, outputs)

    return predict_on_batch


def _by_replicas(original: Callable[..., None]) -> Callable[..., None]:
    """Keras predicts in steps of which each needs a batch for every replica."""

    @functools.wraps(original)
    def make_predict_function(self: Model, force: bool = False) -> None:
        original(self, force)
        strategy = self.distribute_strategy
        known = isinstance(self.predict_function, _Predictions)
        if not known and strategy.num_replicas_in_sync > 1:
            self.predict_function = _Predictions(self, self.predict_function, strategy)

    return make_predict_function


class _Predictions:
    """A predict function whose calls of `Strategy.run` are known as predictions.

    Attributes:
        was_alone: whether the last call took no part of the other workers.
    """

    was_alone = False

    def __init__(self, model: Model, function: Callable[[Any], Any], strategy: Strategy) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)
        # Keras's compiled function would keep one trace for both ways of calling it.
        plain = getattr(function, "python_function", function)

        def together(batches: Sequence[Structure]) -> Structure:
            with predicting.set(self._model()):
                return function(batches)

        def alone(batches: Sequence[Structure]) -> Structure:
            with predicting.set(self._model()), predicting_alone.up():
                return plain(batches)

        self._together: Callable[[Any], Any] = together
        self._alone: Callable[[Any], Any] = alone
        if not model.run_eagerly:
            equal = is_stateful(model)
            self._together = Relaxed(together, strategy, equal)
            self._alone = Relaxed(alone, strategy, equal)

    def __call__(self, batches: Sequence[Structure]) -> Structure:
        """Predictions of all rows of some batches, in order."""
        self.was_alone = isinstance(batches[0], _Whole)
        if isinstance(batches[0], _Whole):
            return self._alone([batch.batch for batch in batches])
        check_divided(self._model(), batches)
        return self._together(batches)


def _not_again(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras gathers what all replicas have: rows of a whole batch, or that they have gathered."""

    @functools.wraps(original)
    def reduce_per_replica(values: Structure, strategy: Strategy, reduction: str) -> Structure:
        if predicting.value is not None and (predicting_alone.is_up or gathers_rows(strategy)):
            return tree.map_structure(lambda v: local_results(strategy, v)[0], values)
        return original(values, strategy, reduction)

    return reduce_per_replica


def _without_pipeline(original: Callable[..., None]) -> Callable[..., None]:
    """Predicts a single batch of arrays from the arrays: a pipeline takes longer to build."""

    @functools.wraps(original)
    def init(
        self: types.EpochIterator,
        distribute_strategy: Strategy | None = None,
        *args: object,
        **kwargs: object,
    ) -> None:
        batch = None
        if args or distribute_strategy is None:
            original(self, distribute_strategy, *args, **kwargs)
            return
        if _is_one_batch_to_predict(distribute_strategy, kwargs):
            EpochIterator.__init__(self, **kwargs)
            batch = _dense(self.data_adapter)
        if batch is None:
            original(self, distribute_strategy, *args, **kwargs)
            return
        self._distribute_strategy = distribute_strategy
        divided = _divided(distribute_strategy, batch)
        if not isinstance(divided, _Whole):
            compare_values(distribute_strategy, batch)
        self._distributed_dataset = [divided]

    return init


def _is_one_batch_to_predict(strategy: Strategy, given: dict[str, Any]) -> bool:
    """Whether `predict`, the only caller that has no `y`, is given arrays of one batch."""
    x = given.get("x")
    if "y" in given or given.get("steps_per_epoch") or strategy.num_replicas_in_sync == 1:
        return False
    if not can_convert_arrays((x, None, None)):
        return False
    rows = {leaf.shape[0] for leaf in tree.flatten(x) if leaf is not None}
    return len(rows) == 1 and 0 < rows.pop() <= (given.get("batch_size") or _BATCH)


def _dense(adapter: DataAdapter) -> Structure:
    """All rows of arrays, as Keras converts them; None if not all are dense."""
    inputs = convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    leaves = [leaf for leaf in tree.flatten(inputs) if leaf is not None]
    dense = all(isinstance(leaf, (np.ndarray, tf.Tensor)) for leaf in leaves)
    return tree.lists_to_tuples(inputs) if dense else None
