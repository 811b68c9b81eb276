"""Data sets that the workers read by themselves.

Each worker gets the data set's own graph once. A job names a batch by its place, and the worker
that runs it passes over the batches that others compute on. The worker that is free first takes
the next one: a slow worker takes fewer, and every batch is taken once. When a worker is lost its
batch goes to another, which opens the data set anew if it is past that place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.distribute import DistributedDatasetsFromFunction, unordered_steps
from tfdist.comm import batch_sharding
from tfdist.errors import ConfigError
from tfdist.strategies.parameter_server.input_feed import Load, ServedIterator, without_optionals
from tfdist.strategies.parameter_server.serialization import Layout, unbox
from tfdist.types import (
    ConcreteFunction,
    Dataset,
    DatasetIterator,
    DType,
    Structure,
    Tensor,
)

__all__ = ["ReadLoad", "Reading", "ShardedDatasets", "Shards", "reading_of"]

#: Graphs larger than this (they hold the arrays of a data set of arrays) stay on the chief.
_LARGEST = 64 << 20


class Reading:
    """A data set on the workers.

    Args:
        dataset: the data set, for the chief's own reading.
        graph: its serialized graph.
        batches: how many batches it has; negative if it has no end.
        recoveries: for each worker how often it was lost, counted by the dispatcher.
    """

    def __init__(
        self, dataset: Dataset, graph: bytes, batches: int, recoveries: Callable[[int], int]
    ) -> None:
        self.dataset, self.batches = dataset, batches
        self.spec = tf.data.IteratorSpec(dataset.element_spec)
        self._graph, self._recoveries = graph, recoveries
        # Traced here: while a worker runs, others may be stopped, whom each new graph waits for.
        spec = dataset.element_spec
        self._load, self._iterator, self._first = _loader(), _opener(spec), _drawer(spec)
        self._passes = 0
        self._copies: dict[int, tuple[int, Any, int]] = {}

    def feed(self) -> _Pass:
        """One pass over the data set."""
        number = self._passes
        self._passes += 1
        return _Pass(self, number)

    def open(self, worker: int, number: int) -> DatasetIterator:
        """An iterator on a worker for a pass; orders that are drawn anew are those of this pass.

        To be called where functions run on that worker.
        """
        lost = self._recoveries(worker)
        known, copy, passes = self._copies.get(worker, (None, None, 0))
        if known != lost or passes > number:
            copy, passes = self._load(tf.constant(self._graph)), 0
        for _ in range(number - passes):
            self._first(copy)
        self._copies[worker] = (lost, copy, number + 1)
        return self._iterator(copy)

    def lost(self, worker: int) -> int:
        """The number of times that a worker was lost."""
        return self._recoveries(worker)


class _Pass:
    """One pass: which batch is next, and where each worker's iterator is."""

    def __init__(self, reading: Reading, number: int) -> None:
        self._reading, self._number = reading, number
        self.batches = reading.batches
        self._places = itertools.count()
        self._iterators: dict[int, tuple[int, Any, int]] = {}
        self._own: Iterator[Any] | None = None

    def batch(self) -> Structure:
        """The next batch itself, read on the chief."""
        if self._own is None:
            self._own = iter(self._reading.dataset)
        return tf.nest.map_structure(without_optionals, next(self._own))

    def next_loads(self) -> Callable[[int], list[Load]]:
        """Makes the loads of the next batch."""
        place = next(self._places)
        if 0 <= self._reading.batches <= place:
            raise StopIteration
        return lambda parts: [ReadLoad(self, place, part, parts) for part in range(parts)]

    def iterator(self, worker: int, place: int) -> tuple[Any, int]:
        """A worker's iterator, and how many batches it passes over before it reads a place."""
        lost = self._reading.lost(worker)
        known, iterator, at = self._iterators.pop(worker, (None, None, 0))
        if known != lost or at > place:
            iterator, at = self._reading.open(worker, self._number), 0
        self._iterators[worker] = (lost, iterator, place + 1)
        return iterator, place - at

    def unknown(self, worker: int) -> None:
        """Forgets a worker's iterator, whose place is not known."""
        self._iterators.pop(worker, None)

    @property
    def spec(self) -> object:
        """The iterator's type."""
        return self._reading.spec


class ReadLoad(Load):
    """A batch, or a part of one, that a worker reads."""

    def __init__(self, of: _Pass, place: int, part: int, parts: int) -> None:
        self._of, self._place, self._part, self._parts = of, place, part, parts
        self._open: dict[int, Any] = {}
        self.resources = [of.spec]
        self.key = ("read", repr(of.spec), parts)

    def box(self, worker: int, told: list[int]) -> np.ndarray[Any, Any]:
        """The numbers of the step, with how many batches it passes over."""
        self._open[worker], skip = self._of.iterator(worker, self._place)
        return Layout([]).box([*told, 0, 0, skip], [])

    def given(self, worker: int) -> list[Any]:
        """The worker's iterator."""
        return [self._open[worker]]

    def make_batch(self, resources: list[Any], box: Tensor) -> tuple[Any, Any, Any]:
        """Reads the batch, and cuts the part out."""
        told, [iterator] = unbox(box), resources

        def pass_over(place: Tensor) -> Tensor:
            with tf.control_dependencies(tf.nest.flatten(iterator.get_next(), True)):
                return place + 1

        at = tf.while_loop(lambda place: place < told.skip, pass_over, [tf.constant(0, tf.int64)])
        with tf.control_dependencies([at]):
            batch = tf.nest.map_structure(without_optionals, iterator.get_next())
        if self._parts == 1:
            rows = tf.constant(-1, tf.int64)
            return batch, rows, rows
        part = batch_sharding.slice_with_share(batch, told.part, self._parts)
        if isinstance(part, batch_sharding.Slice):
            return part.batch, part.count, part.total
        return part, tf.constant(1, tf.int64), tf.constant(1, tf.int64)

    def failed(self, worker: int) -> None:
        """Notes that it is not known how far the worker has read."""
        self._of.unknown(worker)


def reading_of(
    dataset: Dataset, batches: int | None, recoveries: Callable[[int], int]
) -> Reading | None:
    """The data set for the workers to read; None if they cannot.

    They cannot if the data set runs Python code, holds resources of the chief, has an unknown
    number of batches or another order each time, or is made of arrays that are too large to be
    sent whole.

    Args:
        dataset: a `tf.data.Dataset` of global batches.
        batches: how many batches it has, if that is known.
        recoveries: for each worker how often it was lost.
    """
    known = int(dataset.cardinality().numpy()) if batches is None else batches
    ordered = dataset.options().deterministic is not False and not unordered_steps(dataset)
    if known == tf.data.UNKNOWN_CARDINALITY or not ordered:
        return None
    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset.prefetch(2)),
            external_state_policy=1,
            strip_device_assignment=True,
        ).numpy()
    except tf.errors.OpError:
        return None
    if len(graph) > _LARGEST or b"PyFunc" in graph:
        return None
    return Reading(dataset, graph, known, recoveries)


_functions: dict[tuple[str, str], Any] = {}


def _kept(
    kind: str, spec: object, make: Callable[[], Callable[[Any], Any]], dtype: DType = tf.variant
) -> ConcreteFunction:
    """A graph function of one tensor, made once for each type of batch."""
    key = (kind, repr(spec))
    if key not in _functions:
        function = tf.function(make(), autograph=False)
        _functions[key] = function.get_concrete_function(tf.TensorSpec([], dtype))
    return _functions[key]


def _loader() -> ConcreteFunction:
    def load(text: Tensor) -> Tensor:
        return tf.raw_ops.DatasetFromGraph(graph_def=text)

    return _kept("load", None, lambda: load, tf.string)


def _opener(spec: object) -> ConcreteFunction:
    def make(variant: Tensor) -> DatasetIterator:
        return iter(tf.data.experimental.from_variant(variant, spec))

    return _kept("iterator", spec, lambda: make)


def _drawer(spec: object) -> ConcreteFunction:
    """Draws the random numbers of a pass at its start."""

    def draw(variant: Tensor) -> Tensor:
        first = next(iter(tf.data.experimental.from_variant(variant, spec)))
        leaves = tf.nest.flatten(first, expand_composites=True)
        with tf.control_dependencies([leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]):
            return tf.constant(True)

    return _kept("first", spec, lambda: draw)


# Data sets of a function that makes one for each worker: each worker reads its own.
#
# A worker that is lost leaves its data set to the others, until it is back.


class ShardedDatasets(DistributedDatasetsFromFunction):  # type: ignore[misc]
    """The data sets of a data set function, for `fit` and for TensorFlow's coordinator.

    Args:
        stock: TensorFlow's own result for the function.
        shards: makes the data sets that the workers read in `fit`.
    """

    def __init__(self, stock: Dataset, shards: Callable[[], Shards]) -> None:
        self.__dict__.update(stock.__dict__)
        self._make_shards = shards
        self._shards: Shards | None = None

    def __iter__(self) -> Iterator[Any]:
        if tf.inside_function():
            return super().__iter__()
        return ServedIterator(self._made.feed())

    @property
    def cardinality(self) -> int:
        """Batches of a pass; negative if there is no end."""
        return self._made.batches

    @property
    def _made(self) -> Shards:
        if self._shards is None:
            self._shards = self._make_shards()
        return self._shards


class Shards:
    """One data set for each worker.

    Args:
        make: makes a worker's data set of a `tf.distribute.InputContext`.
        workers: how many workers there are.
        together: whether a global batch takes a batch of each data set, as in `sync`.
        recoveries: for each worker how often it was lost.

    Raises:
        ConfigError: if the workers cannot read the data sets by themselves, or `together` and they
            have different numbers of batches.
    """

    def __init__(
        self,
        make: Callable[[Any], Any],
        workers: int,
        together: bool,
        recoveries: Callable[[int], int],
    ) -> None:
        contexts = [tf.distribute.InputContext(workers, each, 1) for each in range(workers)]
        datasets = [make(context) for context in contexts]
        self.readings: list[Reading] = []
        for worker, dataset in enumerate(datasets):
            reading = reading_of(dataset, None, recoveries)
            if reading is None:
                raise ConfigError(
                    f"Worker {worker} cannot read what the data set function makes for it: the "
                    "data set runs Python code, holds tables of the chief, has an unknown number "
                    "of batches or no fixed order. Make it of tf.data operations on files, and "
                    "say its length with tf.data.experimental.assert_cardinality(n)."
                )
            self.readings.append(reading)
        self.together = together
        counts = [reading.batches for reading in self.readings]
        if together and len(set(counts)) > 1:
            raise ConfigError(
                f"The workers' data sets have different numbers of batches ({counts}), and "
                "mode='sync' takes one of each for an update. Make them equally long, with "
                "dataset.take or repeat, or choose mode='async'."
            )
        endless = any(count < 0 for count in counts)
        self.batches = -1 if endless else counts[0] if together else sum(counts)

    def feed(self) -> _ShardPass:
        """One pass over all data sets."""
        return _ShardPass(self)


class _ShardPass:
    """One pass: how far each data set is, and how many of its batches are under way."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.batches = shards.batches
        self._passes = [reading.feed() for reading in shards.readings]
        self._taken = [0] * len(self._passes)
        self._under_way = [0] * len(self._passes)

    def batch(self) -> Structure:
        """The next batch itself, read on the chief, one data set after the other."""
        for each in self._passes:
            try:
                return each.batch()
            except StopIteration:
                continue
        raise StopIteration

    def next_loads(self) -> Callable[[int], list[Load]]:
        """Makes the loads of the next batch: of all data sets, or of the least busy one."""
        left = [
            shard
            for shard, reading in enumerate(self._shards.readings)
            if reading.batches < 0 or self._taken[shard] < reading.batches
        ]
        if not left:
            raise StopIteration
        if not self._shards.together:
            left = [min(left, key=lambda shard: self._under_way[shard])]
        loads = [self._take(shard, len(left)) for shard in left]

        def of_parts(parts: int) -> list[Load]:
            if parts != len(loads):
                raise ConfigError(
                    "A training step that cannot be computed in parts conflicts with a data set "
                    "function under mode='sync', where each worker reads a part of the global "
                    "batch. Give fit one data set of global batches, or choose mode='async'."
                )
            return list(loads)

        return of_parts

    def _take(self, shard: int, parts: int) -> _ShardLoad:
        place = self._taken[shard]
        self._taken[shard] += 1
        self._under_way[shard] += 1
        return _ShardLoad(self._passes[shard], place, shard, parts, self._end)

    def _end(self, shard: int) -> None:
        self._under_way[shard] -= 1


class _ShardLoad(ReadLoad):
    """A batch of one worker's data set; in `sync` the parts count alike."""

    def __init__(
        self, of: Any, place: int, shard: int, parts: int, end: Callable[[int], None]
    ) -> None:
        super().__init__(of, place, shard if parts > 1 else 0, 1)
        self.prefers = shard
        self._count, self._end = parts, end
        self.key = ("shard", self.key, parts)

    def make_batch(self, resources: list[Any], box: Tensor) -> tuple[Any, Any, Any]:
        """Reads the batch."""
        batch, _, _ = super().make_batch(resources, box)
        return batch, tf.constant(1, tf.int64), tf.constant(self._count, tf.int64)

    def done(self) -> None:
        """Notes that the step has ended."""
        self._end(self.prefers or 0)
