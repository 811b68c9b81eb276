"""The source of a step's batches: the chief sends them, or the workers read them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist.comm import batch_sharding
from tfdist.strategies.parameter_server.serialization import Layout, unbox
from tfdist.types import Dataset, Structure, Tensor

__all__ = ["ChiefFeed", "Load", "ServedDataset", "ServedIterator", "load_of", "split"]


class Load:
    """The batch of a job, as a worker gets it.

    Attributes:
        key: identifies the graphs that can take it: those traced with an equal key.
        resources: types of the graph's inputs besides a box.
        rows: how many examples there are, if the chief knows.
        lasting: whether the resources are the same for the next batch.
        prefers: the worker that has it at hand, if one has.
    """

    key: Hashable
    resources: list[Any]
    rows: int | None = None
    lasting = True
    prefers: int | None = None

    def box(self, worker: int, told: list[int]) -> np.ndarray[Any, Any]:
        """The box for a worker.

        Args:
            worker: its number.
            told: the step's number, the updates so far, and the part.
        """
        raise NotImplementedError

    def given(self, worker: int) -> list[Any]:
        """The values of `resources` for a worker."""
        raise NotImplementedError

    def make_batch(self, resources: list[Any], box: Tensor) -> tuple[Any, Any, Any]:
        """The batch in a graph, with the number of its examples and that of the global batch."""
        raise NotImplementedError

    def failed(self, worker: int) -> None:
        """Notes that a worker has not run the step, or not to its end."""

    def done(self) -> None:
        """Notes that the step has ended."""


class Feed(Protocol):
    """A pass over a data set, as a source of batches or of their loads."""

    @property
    def batches(self) -> int | None:
        """The number of batches; negative if there is no end, None if it is not known."""

    def batch(self) -> Structure:
        """The next batch itself."""

    def next_loads(self) -> Callable[[int], list[Load]]:
        """Makes the loads of the next batch, of the number of parts."""


class ServedDataset(tf.distribute.DistributedDataset):  # type: ignore[misc]
    """A data set of global batches for Keras's loops on parameter servers.

    Args:
        dataset: the data set.
        feed: makes a source of loads for one pass over it.
    """

    def __init__(self, dataset: Dataset, feed: Callable[[], Any]) -> None:
        self._dataset, self._feed = dataset, feed

    def __iter__(self) -> Iterator[Any]:
        return ServedIterator(self._feed())

    @property
    def element_spec(self) -> Structure:
        """The batches' types."""
        return self._dataset.element_spec


class ServedIterator:
    """One pass over a data set.

    Args:
        feed: hands out the loads of batches.

    Attributes:
        batches: how many there are; negative if there is no end, None if it is not known.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.batches: int | None = feed.batches

    def next_loads(self) -> Callable[[int], list[Load]]:
        """The next global batch: makes its loads, of the number of parts, one for each.

        Raises:
            StopIteration: at the end.
        """
        return self._feed.next_loads()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Structure:
        return self._feed.batch()


class ChiefFeed:
    """The chief reads the batches and sends each to the worker that computes on it.

    Args:
        dataset: yields global batches.
        batches: how many, if that is known.
    """

    def __init__(self, dataset: Dataset, batches: int | None = None) -> None:
        self.batches = batches
        self._iterator = iter(dataset)

    def batch(self) -> Structure:
        """The next global batch itself.

        Raises:
            StopIteration: at the end.
        """
        return tf.nest.map_structure(without_optionals, next(self._iterator))

    def next_loads(self) -> Callable[[int], list[Load]]:
        """Makes the loads of the next global batch."""
        batch = self.batch()
        return lambda parts: split(batch, parts)


class _Sent(Load):
    """A batch that the chief sends."""

    def __init__(self, batch: Structure, count: int | None, total: int | None) -> None:
        self._batch = tf.nest.map_structure(_as_tensor, batch)
        self._leaves = tf.nest.flatten(self._batch, expand_composites=True)
        present = [leaf for leaf in self._leaves if leaf is not None]
        self._numeric = [t for t in present if t.dtype != tf.string]
        self._strings = [t for t in present if t.dtype == tf.string]
        self._layout = Layout(self._numeric)
        self.resources = [_open(t) for t in self._strings]
        self.lasting = not self._strings
        self.rows = _rows(present) if count is None else count
        self._total = total or self.rows
        kinds = [type(leaf).__name__ for leaf in tf.nest.flatten(self._batch)]
        structure = repr(tf.nest.map_structure(lambda leaf: 0, self._batch))
        self.key = (structure, tuple(kinds), tuple(repr(_open(t)) for t in present))

    def box(self, worker: int, told: list[int]) -> np.ndarray[Any, Any]:
        """A box with the batch's numbers, and the step's."""
        arrays = [t.numpy() for t in self._numeric]
        return self._layout.box([*told, self.rows or 0, self._total, 0], arrays)

    def given(self, worker: int) -> list[Any]:
        """The batch's strings."""
        return self._strings

    def make_batch(self, resources: list[Any], box: Tensor) -> tuple[Any, Any, Any]:
        """The batch as it was."""
        told, numeric = unbox(box), iter(self._layout.open(box))
        strings = iter(resources)
        filled = [
            leaf if leaf is None else next(strings if leaf.dtype == tf.string else numeric)
            for leaf in self._leaves
        ]
        # The type of a sparse or ragged part has no number of rows: other parts have others.
        like = tf.nest.map_structure(_spec_or_leaf, self._batch)
        batch = tf.nest.pack_sequence_as(like, filled, expand_composites=True)
        return batch, told.count, told.total


def load_of(batch: Structure, count: int | None = None, total: int | None = None) -> Load:
    """A load that carries a batch.

    Args:
        batch: a nest of tensors, arrays and None.
        count: examples of it that count; by default all.
        total: examples of the global batch; by default as many.
    """
    return _Sent(batch, count, total)


def split(batch: Structure, parts: int) -> list[Load]:
    """The loads of a batch in parts, of which some may be empty."""
    if parts == 1:
        return [load_of(batch)]
    batch = tf.nest.map_structure(_as_tensor, batch)
    slices = [batch_sharding.slice_with_share(batch, part, parts) for part in range(parts)]
    return [
        load_of(each.batch, int(each.count), int(each.total))
        if isinstance(each, batch_sharding.Slice)
        else load_of(each)
        for each in slices
    ]


def without_optionals(leaf: object) -> object:
    """None for what Keras's data sets have in place of None."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def _as_tensor(leaf: Structure) -> Structure:
    if leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return tf.convert_to_tensor(leaf)


def _rows(tensors: list[Any]) -> int:
    return next((int(t.shape[0]) for t in tensors if t.shape.rank), 1)


def _spec_or_leaf(leaf: Structure) -> Structure:
    spec = batch_sharding.open_spec(leaf)
    return leaf if spec is None else spec


def _open(tensor: Tensor) -> tf.TensorSpec:
    shape = tensor.shape
    return tf.TensorSpec([None, *shape[1:]] if shape.rank else shape, tensor.dtype)
