"""The tensors of features and labels, from the result of an `input_fn`, once or by replica."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.types import Dataset, DatasetIterator, Structure, Tensor, TensorSpec

__all__ = ["Batch", "batches_of", "features_and_labels"]

tf1 = tf.compat.v1

_DATASETS = (tf.data.Dataset, tf1.data.Dataset)


def features_and_labels(result: Any) -> tuple[Any, Any]:
    """The tensors of one batch, from the result of an `input_fn`; labels are None without any."""
    if isinstance(result, _DATASETS):
        with tf1.device("/cpu:0"):
            result = _iterator_of(result).get_next()
    return _split(result)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The features and labels that one replica computes on.

    `present` and `more` are scalar tensors: whether this replica has a batch, and whether there is
    one after it, as far as that is known.
    """

    features: Structure
    labels: Structure
    present: Tensor
    more: Tensor


def batches_of(result: Any, count: int, *, fill: bool, lookahead: bool = False) -> list[Batch]:
    """Successive batches of a data set for the replicas of a process, in their order.

    Args:
        result: the result of an `input_fn`.
        count: the number of replicas.
        fill: whether the last replicas get empty batches if the input ends before them. If not,
            such a step is left out, and the input ends.
        lookahead: whether a replica is to know that a batch is its last. It does if it is the
            only one and its batches are dense tensors.
    """
    if not isinstance(result, _DATASETS):
        raise ConfigError(
            f"input_fn returned {result!r}, but {count} replicas read from one input: return a "
            "tf.data.Dataset."
        )
    with tf.device("/cpu:0"):
        fill = fill and count > 1 and _can_be_empty(result.element_spec)
        lookahead = lookahead and count == 1 and _can_be_empty(result.element_spec)
        if lookahead:
            result = _marked(result)
        iterator = _iterator_of(result)
        batches: list[Batch] = []
        before: list[Any] = []
        for number in range(count):
            with tf.control_dependencies(before):  # Else the order is left to chance.
                element, present = _next(iterator, result.element_spec, fill and number > 0)
            before = [tf.nest.flatten(element, expand_composites=True)[0]]
            element, more = element if lookahead else (element, tf.constant(True))
            batches.append(Batch(*_split(element), present, more))
    return batches


def _iterator_of(dataset: Dataset) -> DatasetIterator:
    """An iterator over a data set, initialized with the tables of the graph."""
    iterator = tf1.data.make_initializable_iterator(dataset)
    tf1.add_to_collection(tf1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator


def _split(batch: Structure) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list):
        if len(batch) != 2:
            raise ConfigError(
                f"input_fn gives {len(batch)} elements, but an element of its data set, or what it "
                "returns, is features or a pair of features and labels."
            )
        return batch[0], batch[1]
    return batch, None


def _marked(dataset: Dataset) -> Dataset:
    """The elements of a data set, each with the word whether there is another after it."""
    blank = tf.nest.map_structure(_empty, dataset.element_spec)
    end = tf.data.Dataset.from_tensors((blank, False))
    real = dataset.map(lambda *parts: (parts if len(parts) > 1 else parts[0], True))
    late = real.concatenate(end).scan(
        (blank,), lambda before, now: ((now[0],), (before[0], now[1]))
    )
    return late.skip(1)


def _next(iterator: DatasetIterator, spec: Structure, fill: bool) -> tuple[Any, Any]:
    """The next element, and whether there was one."""
    if not fill:
        return iterator.get_next(), tf.constant(True)
    optional = tf1.data.experimental.get_next_as_optional(iterator)
    present = optional.has_value()
    element = tf.cond(present, optional.get_value, lambda: tf.nest.map_structure(_empty, spec))
    return element, present


def _can_be_empty(spec: TensorSpec) -> bool:
    return all(
        isinstance(each, tf.TensorSpec) and each.shape.rank for each in tf.nest.flatten(spec)
    )


def _empty(spec: TensorSpec) -> Tensor:
    """A batch of no examples."""
    return tf.zeros([0, *(size or 0 for size in spec.shape.as_list()[1:])], spec.dtype)
