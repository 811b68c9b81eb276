"""Where the batches of a step come from: the chief sends them, or the workers read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import data

__all__ = ["ChiefFeed", "Load", "ServedDataset", "ServedIterator"]


class Load:
    """What a job needs to get its batch.

    Args:
        key: says which graphs can take it: those traced with an equal key.
        signature: types of the tensors for the graph.
        tensors: for a worker's number, the values of these.
        make_batch: makes the batch in the graph, of the head and the tensors; returns it, the
            number of its examples and that of the global batch.
        count: examples in the part, for the head.
        total: examples in the global batch, for the head.
    """

    def __init__(
        self,
        key: Any,
        signature: list[Any],
        tensors: Callable[[int], list[Any]],
        make_batch: Callable[[Any, Any], tuple[Any, Any, Any]],
        count: int,
        total: int,
    ) -> None:
        self.key, self.signature, self.tensors, self.make_batch = (
            key,
            signature,
            tensors,
            make_batch,
        )
        self.count, self.total = count, total


class ServedDataset(tf.distribute.DistributedDataset):  # type: ignore[misc]
    """A data set of global batches for Keras's loops on parameter servers.

    Args:
        dataset: the data set.
        feed: makes a source of loads for one pass over it.
    """

    def __init__(self, dataset: Any, feed: Callable[[], Any]) -> None:
        self._dataset, self._feed = dataset, feed

    def __iter__(self) -> Any:
        return ServedIterator(self._feed())

    @property
    def element_spec(self) -> Any:
        """The batches' types."""
        return self._dataset.element_spec


class ServedIterator:
    """One pass over a data set.

    Args:
        feed: hands out the loads of batches.
    """

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def next_loads(self) -> Callable[[int], list[Load]]:
        """The next global batch: makes its loads, of the number of parts, one for each.

        Raises:
            StopIteration: at the end.
        """
        loads: Callable[[int], list[Load]] = self._feed.next_loads()
        return loads

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self._feed.batch()


class ChiefFeed:
    """The chief reads the batches and sends each to the worker that computes on it.

    Args:
        dataset: yields global batches.
    """

    def __init__(self, dataset: Any) -> None:
        self._iterator = iter(dataset)

    def batch(self) -> Any:
        """The next global batch itself.

        Raises:
            StopIteration: at the end.
        """
        return tf.nest.map_structure(_without_optionals, next(self._iterator))

    def next_loads(self) -> Callable[[int], list[Load]]:
        """Makes the loads of the next global batch."""
        batch = self.batch()
        return lambda parts: split(batch, parts)


def split(batch: Any, parts: int) -> list[Load]:
    """The loads of a batch in parts, of which some may be empty."""
    if parts == 1:
        return [load_of(batch)]
    slices = [data.slice_with_share(batch, part, parts) for part in range(parts)]
    return [_part(each) for each in slices]


def _without_optionals(leaf: Any) -> Any:
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def _part(each: Any) -> Load:
    if isinstance(each, data.Slice):
        return load_of(each.batch, int(each.count), int(each.total))
    return load_of(each)


def load_of(batch: Any, count: int | None = None, total: int | None = None) -> Load:
    """A load that carries a batch.

    Args:
        batch: a nest of tensors, arrays and None.
        count: examples of it that count; by default all.
        total: examples of the global batch; by default as many.
    """
    batch = tf.nest.map_structure(
        lambda leaf: (
            leaf
            if leaf is None
            else tf.convert_to_tensor(leaf)
            if not isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))
            else leaf
        ),
        batch,
    )
    leaves = tf.nest.flatten(batch, expand_composites=True)
    tensors = [leaf for leaf in leaves if leaf is not None]
    signature = [_open(t) for t in tensors]
    rows = _rows(tensors) if count is None else count

    def make_batch(head: Any, given: Any) -> tuple[Any, Any, Any]:
        supply = iter(given)
        filled = [None if leaf is None else next(supply) for leaf in leaves]
        made = tf.nest.pack_sequence_as(batch, filled, expand_composites=True)
        return made, head[3], head[4]

    kinds = tuple(type(leaf).__name__ for leaf in tf.nest.flatten(batch))
    key = (repr(tf.nest.map_structure(lambda leaf: 0, batch)), kinds, tuple(map(repr, signature)))
    return Load(key, signature, lambda worker: tensors, make_batch, rows, total or rows)


def _rows(tensors: list[Any]) -> int:
    return next((int(t.shape[0]) for t in tensors if t.shape.rank), 1)


def _open(tensor: Any) -> tf.TensorSpec:
    shape = tensor.shape
    return tf.TensorSpec([None, *shape[1:]] if shape.rank else shape, tensor.dtype)


def head(job: int, update: int, part: int, load: Load) -> Any:
    """What the step of a job is told, as `graph.HEAD`."""
    return tf.constant(np.array([job, update, part, load.count, load.total], np.int64))
