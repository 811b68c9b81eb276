"""`train_on_batch` and `test_on_batch`: each replica takes its slice.

Stock Keras hands the whole batch to every replica, which multiplies counts by the number of
replicas. `predictions.py` has `predict_on_batch`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.utils.python_utils import pythonify_logs

from tfdist import data
from tfdist._tensorflow import regroup
from tfdist.keras.comparing import compare_values
from tfdist.keras.hooks import Hook
from tfdist.keras.relaxed import Relaxed
from tfdist.keras.stateful import check_divided, is_stateful


def hooks() -> list[Hook]:
    """The seams of Keras's methods on single batches."""
    return [
        Hook(TensorFlowTrainer, "train_on_batch", _train_on_batch),
        Hook(TensorFlowTrainer, "test_on_batch", _test_on_batch),
    ]


def spread(strategy: Any, batch: Any) -> Any:
    """One global batch as per-replica slices, in the order of the replicas' predictions."""
    values = as_values(batch)
    shard = strategy.shard
    parts = [data.slice_with_share(values, p, shard.replicas) for p in shard.positions()]
    return parts[0] if len(parts) == 1 else regroup(parts)


def as_values(batch: Any) -> Any:
    """A batch of arrays and tensors; arrays are sliced before they are copied into tensors."""

    def value(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, (np.ndarray, tf.SparseTensor, tf.RaggedTensor)):
            return leaf
        return tf.convert_to_tensor(leaf)

    return tree.map_structure(value, batch)


def _train_on_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_on_batch(
        self: Any,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        both_weights = class_weight is not None and sample_weight is not None
        if self.distribute_strategy.num_replicas_in_sync == 1 or both_weights:
            return original(self, x, y, sample_weight, class_weight, return_dict)
        if class_weight is not None:
            sample_weight = data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
        self._assert_compile_called("train_on_batch")
        self.make_train_function()
        return _run(self, "train_function", (x, y, sample_weight), return_dict)

    return train_on_batch


def _test_on_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def test_on_batch(
        self: Any, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return original(self, x, y, sample_weight, return_dict)
        self._assert_compile_called("test_on_batch")
        self.make_test_function()
        return _run(self, "test_function", (x, y, sample_weight), return_dict)

    return test_on_batch


def _run(model: Any, name: str, batch: Any, return_dict: bool) -> Any:
    """Runs one step on a spread batch and reads the metrics over all replicas."""
    strategy = model.distribute_strategy
    if getattr(model, name) not in _compared:
        _compared.add(getattr(model, name))
        compare_values(strategy, as_values(batch))
    step = _one_step(model, name)
    slices = spread(strategy, batch)
    check_divided(model, slices)
    model.reset_metrics()
    logs = step(slices)
    logs = pythonify_logs(model._get_metrics_result_or_logs(logs))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


#: Functions whose first batch has been compared between the workers.
_compared: weakref.WeakSet[Any] = weakref.WeakSet()

_steps: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _one_step(model: Any, name: str) -> Callable[[Any], Any]:
    """A function of one batch for a model's train or test function, kept as long as that is."""
    function = getattr(model, name)
    if model.run_eagerly:
        return lambda batch: function(iter([batch]))
    if function not in _steps:
        alive: Callable[[], Any] = weakref.ref(function)
        strategy, equal = model.distribute_strategy, is_stateful(model)
        _steps[function] = Relaxed(lambda batch: alive()(iter([batch])), strategy, equal)
    kept: Callable[[Any], Any] = _steps[function]
    return kept
