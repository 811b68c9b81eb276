"""`train_on_batch` and `test_on_batch`: each replica takes its slice.

Stock Keras hands the whole batch to every replica, which multiplies counts by the number of
replicas. `predictions.py` has `predict_on_batch`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist._keras import (
    RESETS_METRICS,
    TensorFlowTrainer,
    data_adapter_utils,
    pythonify_logs,
    tree,
)
from tfdist._tf.distribute import local_results, regroup
from tfdist.comm import batch_sharding, host_collectives
from tfdist.keras.hooks import Hook, fitting
from tfdist.keras.input_comparison import compare_values
from tfdist.keras.stateful import check_divided, is_stateful
from tfdist.types import Model, Strategy, Structure, Tensor

# Functions whose traces do not depend on how many examples this process got.
#
# TensorFlow numbers the collectives of a function when it traces it. If a batch of 47 examples
# leaves 24 rows on worker 0, a size it has seen, and 23 on worker 1, only worker 1 traces again:
# the numbers drift apart, and the next collective waits for a peer that never comes
# (tensorflow#37112). Functions that Keras calls with eager batches are therefore traced with an
# open batch dimension.
#
# Another dimension is opened when it has been seen with two sizes, as `reduce_retracing` does.
# Only the first dimension of a batch is sliced: all workers see the other sizes of the global
# batch, and trace at the same call.

#: For each local replica the specifications of its tensors.
_Specs = list[list[tf.TensorSpec]]


class _Trace(NamedTuple):
    """A traced function, and the types of its arguments."""

    specs: _Specs
    function: Callable[..., Any]


class Relaxed:
    """Calls `fn` with a batch, per replica, in a function with open dimensions.

    Args:
        fn: takes one structure of per-replica values and returns tensors.
        strategy: the strategy whose replicas the values are for.
        equal: whether all slices have the same number of rows, which is then not open at first.
    """

    def __init__(self, fn: Callable[[Any], Any], strategy: Strategy, equal: bool = False) -> None:
        self._fn = fn
        self._strategy = strategy
        self._equal = equal
        self._traced: dict[Any, _Trace] = {}

    def __call__(self, batch: Structure) -> object:
        """Runs `fn` on `batch`."""
        count = len(self._strategy.extended.worker_devices)
        parts = [self._on_replica(batch, i) for i in range(count)]
        flat = [self._tensors(part) for part in parts]
        kinds = [[(t.dtype, t.shape.rank) for t in tensors] for tensors in flat]
        like = tf.nest.map_structure(_kind, parts[0])
        key = (repr(like), repr(kinds))
        trace = self._traced.get(key)
        specs = [[_spec(tensor, self._equal) for tensor in tensors] for tensors in flat]
        if trace is not None:
            specs = _widened(trace.specs, specs)
        if trace is None or specs != trace.specs:
            trace = self._traced[key] = _Trace(specs, self._trace(like, specs))
        return trace.function(flat)

    def _on_replica(self, batch: Structure, replica: int) -> Structure:
        def own(leaf: Structure) -> Structure:
            if leaf is None:
                return None
            values = local_results(self._strategy, leaf)  # one, if it is the same for all
            return values[replica if len(values) > 1 else 0]

        return tf.nest.map_structure(own, batch)

    def _tensors(self, part: Structure) -> list[Any]:
        leaves = tf.nest.flatten(part, expand_composites=True)
        return [tf.convert_to_tensor(leaf) for leaf in leaves if leaf is not None]

    def _trace(self, like: Structure, specs: _Specs) -> Callable[..., Any]:
        def restore(tensors: list[Any]) -> Structure:
            supply = iter(tensors)
            return tf.nest.map_structure(lambda kind: _restored(kind, supply), like)

        def on_tensors(flat: list[list[Any]]) -> object:
            parts = [restore(tensors) for tensors in flat]
            return self._fn(parts[0] if len(parts) == 1 else regroup(parts))

        compiled: Callable[..., Any] = tf.function(
            on_tensors, input_signature=[specs], autograph=False
        )
        return compiled


def _widened(before: _Specs, specs: _Specs) -> _Specs:
    """Specifications of the same ranks that fit what two others fit."""
    return [
        [
            tf.TensorSpec(_common(old.shape, new.shape), new.dtype)
            for old, new in zip(olds, news, strict=True)
        ]
        for olds, news in zip(before, specs, strict=True)
    ]


def _common(old: tf.TensorShape, new: tf.TensorShape) -> list[int | None]:
    return [a if a == b else None for a, b in zip(old, new, strict=True)]


def _spec(tensor: Tensor, equal: bool) -> tf.TensorSpec:
    shape = tensor.shape
    open_rows = shape.rank and not equal
    return tf.TensorSpec([None, *shape[1:]] if open_rows else shape, tensor.dtype)


def _kind(leaf: Structure) -> object:
    """The kind of a leaf: its type if it is a dense tensor, else a specification."""
    spec = batch_sharding.open_spec(leaf)
    return type(leaf).__name__ if spec is None else spec


def _restored(kind: object, supply: Iterator[Any]) -> Structure:
    """The next leaf of a batch, from a supply of its tensors."""
    if kind == type(None).__name__:
        return None
    if isinstance(kind, str):
        return next(supply)
    count = len(tf.nest.flatten(kind, expand_composites=True))
    tensors = [next(supply) for _ in range(count)]
    return tf.nest.pack_sequence_as(kind, tensors, expand_composites=True)


def hooks() -> list[Hook]:
    """The seams of Keras's methods on single batches."""
    return [
        Hook(TensorFlowTrainer, "train_on_batch", _train_on_batch),
        Hook(TensorFlowTrainer, "test_on_batch", _test_on_batch),
    ]


def spread(strategy: Strategy, batch: Structure) -> Structure:
    """One global batch as per-replica slices, in the order of the replicas' predictions."""
    values = as_values(batch)
    shard = strategy.shard
    parts = [batch_sharding.slice_with_share(values, p, shard.replicas) for p in shard.positions()]
    return parts[0] if len(parts) == 1 else regroup(parts)


def as_values(batch: Structure) -> Structure:
    """A batch of arrays and tensors; arrays are sliced before they are copied into tensors."""

    def value(leaf: Structure) -> Structure:
        if leaf is None or isinstance(leaf, (np.ndarray, tf.SparseTensor, tf.RaggedTensor)):
            return leaf
        return tf.convert_to_tensor(leaf)

    return tree.map_structure(value, batch)


def _train_on_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras gives each replica the whole batch."""

    @functools.wraps(original)
    def train_on_batch(
        self: Model,
        x: Structure,
        y: Structure = None,
        sample_weight: Structure = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        both_weights = class_weight is not None and sample_weight is not None
        if both_weights:
            return original(self, x, y, sample_weight, class_weight, return_dict)
        self._assert_compile_called("train_on_batch")
        self.make_train_function()
        _compare_first(self, "train_function", (x, y, sample_weight))
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return original(self, x, y, sample_weight, class_weight, return_dict)
        if class_weight is not None:
            sample_weight = data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
        return _run(self, "train", (x, y, sample_weight), return_dict)

    return train_on_batch


def _test_on_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras gives each replica the whole batch."""

    @functools.wraps(original)
    def test_on_batch(
        self: Model,
        x: Structure,
        y: Structure = None,
        sample_weight: Structure = None,
        return_dict: bool = False,
    ) -> Any:
        self._assert_compile_called("test_on_batch")
        self.make_test_function()
        _compare_first(self, "test_function", (x, y, sample_weight))
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return original(self, x, y, sample_weight, return_dict)
        return _run(self, "test", (x, y, sample_weight), return_dict)

    return test_on_batch


def _run(model: Model, kind: str, batch: Structure, return_dict: bool) -> Any:
    """Runs one step on a spread batch and returns its logs of all replicas."""
    step = _one_step(model, f"{kind}_function")
    slices = spread(model.distribute_strategy, batch)
    check_divided(model, slices)
    if RESETS_METRICS:
        model.reset_metrics()
    logs = pythonify_logs(step(slices))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


#: Functions whose first batch has been compared between the workers.
_compared: weakref.WeakSet[Any] = weakref.WeakSet()


def _compare_first(model: Model, name: str, batch: Structure) -> None:
    """Raises if the first batch of a model's train or test function differs between workers."""
    strategy, function = model.distribute_strategy, getattr(model, name)
    if host_collectives.worker_count(strategy) > 1 and function not in _compared:
        _compared.add(function)
        compare_values(strategy, as_values(batch))


_steps: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _one_step(model: Model, name: str) -> Callable[[Any], Any]:
    """A function of one batch for a model's train or test function, kept as long as that is."""
    function = getattr(model, name)
    if model.run_eagerly:
        return lambda batch: _with_logs(function, batch)
    if function not in _steps:
        alive: Callable[[], Any] = weakref.ref(function)
        strategy, equal = model.distribute_strategy, is_stateful(model)
        _steps[function] = Relaxed(lambda batch: _with_logs(alive(), batch), strategy, equal)
    kept: Callable[[Any], Any] = _steps[function]
    return kept


def _with_logs(function: Callable[[Any], Any], batch: Structure) -> Structure:
    """The logs of one batch, which is not one of `fit`'s also if a callback of `fit` has it run."""
    with fitting.set(False):
        return function(iter([batch]))
