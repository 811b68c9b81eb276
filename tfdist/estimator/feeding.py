"""From an `input_fn` to the tensors of features and labels in the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.calling import call_with
from tfdist.types import Dataset, DatasetIterator, Structure

__all__ = ["call_input_fn", "features_and_labels", "iterator_of", "split"]

tf1 = tf.compat.v1


def call_input_fn(input_fn: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Calls an `input_fn` on the CPU.

    Args:
        input_fn: takes any of `mode`, `params`, `config` and `input_context`.
        offered: their values.

    Returns:
        A `tf.data.Dataset`, `(features, labels)`, or features.
    """
    taken = {name: value for name, value in offered.items() if value is not None}
    if "input_context" not in taken:
        taken["input_context"] = None
    with tf1.device("/cpu:0"):
        return call_with("input_fn", input_fn, taken)


def iterator_of(dataset: Dataset) -> DatasetIterator:
    """An iterator over a data set, initialized with the tables of the graph."""
    iterator = tf1.data.make_initializable_iterator(dataset)
    tf1.add_to_collection(tf1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator


def features_and_labels(result: Any) -> tuple[Any, Any]:
    """The tensors of one batch, from the result of an `input_fn`.

    Labels are None if there are none.
    """
    if isinstance(result, tf.data.Dataset | tf1.data.Dataset):
        with tf1.device("/cpu:0"):
            result = iterator_of(result).get_next()
    return split(result)


def split(batch: Structure) -> tuple[Any, Any]:
    """Features and labels of a batch.

    Raises:
        ConfigError: if it is neither features nor a pair.
    """
    if isinstance(batch, tuple | list):
        if len(batch) != 2:
            raise ConfigError(
                f"input_fn gives {len(batch)} elements, but an element of its data set, or what it "
                "returns, is features or a pair of features and labels."
            )
        return batch[0], batch[1]
    return batch, None
