"""The source of a step's batches: the chief sends them, or the workers read them.

Each worker gets the graph of a data set that it can read once. A job names a batch by its place,
and the worker that runs it passes over the batches that others compute on. The worker that is free
first takes the next one: a slow worker takes fewer, and every batch is taken once. When a worker is
lost its batch goes to another, which opens the data set anew if it is past that place.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import tensorflow as tf

from tfdist._tf.data import unordered_steps
from tfdist._tf.distribute import DistributedDatasetsFromFunction
from tfdist.comm import batch_sharding
from tfdist.errors import ConfigError
from tfdist.strategies.parameter_server.passes import Source, begin_pass, read_here, take_nearest
from tfdist.strategies.parameter_server.serialization import Layout, unbox
from tfdist.types import (
    Array,
    ConcreteFunction,
    Dataset,
    DatasetIterator,
    Structure,
    Tensor,
)

__all__ = [
    "ChiefPass",
    "GlobalBatchDataset",
    "Load",
    "Pass",
    "Reading",
    "ShardedDatasets",
    "Shards",
    "reading_of",
    "split",
]

#: Graphs larger than this (they hold the arrays of a data set of arrays) stay on the chief.
_LARGEST = 64 << 20


class Lengths:
    """The shapes of the batches of a function so far.

    A second length opens a dimension for all that follow, as in `tf.function`: a graph for each
    would cost its tracing on all servers.
    """

    def __init__(self) -> None:
        self._shapes: dict[Hashable, list[Any]] = {}

    def widened(self, kind: Hashable, shapes: list[Any]) -> list[Any]:
        """The shapes of a batch, open where another of its kind had another length."""
        known = self._shapes.get(kind, shapes)
        pairs = zip(known, shapes, strict=True)
        self._shapes[kind] = [a.most_specific_common_supertype([b]) for a, b in pairs]
        return self._shapes[kind]


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

    def widen(self, lengths: Lengths) -> None:
        """Leaves the dimensions open by which batches have differed so far."""

    def box(self, worker: int, numbers: list[int]) -> Array:
        """The box for a worker, with the step's number, the updates so far, and the part."""
        raise NotImplementedError

    def resource_values(self, worker: int) -> list[Any]:
        """The values of `resources` for a worker."""
        raise NotImplementedError

    def make_batch(self, resources: list[Any], box: Tensor) -> tuple[Any, Any, Any]:
        """The batch in a graph, with the number of its examples and that of the global batch."""
        raise NotImplementedError

    def failed(self, worker: int) -> None:
        """Notes that a worker has not run the step, or not to its end."""

    def done(self) -> None:
        """Notes that the step has ended."""


class Pass(Iterator[Structure]):
    """One pass over a data set, as a source of batches or of their loads.

    Attributes:
        batches: how many there are; negative if there is no end, None if it is not known.
    """

    batches: int | None

    def next_loads(self) -> Callable[[int], list[Load]]:
        """The next global batch: makes its loads, of the number of parts, one for each.

        Raises:
            StopIteration: at the end.
        """
        raise NotImplementedError


class GlobalBatchDataset(tf.distribute.DistributedDataset):  # type: ignore[misc]
    """A data set of global batches for Keras's loops; `begin` begins a pass over it."""

    def __init__(self, dataset: Dataset, begin: Callable[[], Pass]) -> None:
        self._dataset, self._begin = dataset, begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()

    @property
    def element_spec(self) -> Structure:
        """The batches' types."""
        return self._dataset.element_spec


class ChiefPass(Pass):
    """The chief reads the batches and sends each to the worker that computes on it."""

    def __init__(self, dataset: Dataset, batches: int | None = None) -> None:
        self.batches = batches
        self._iterator = iter(dataset)

    def __next__(self) -> Structure:
        return tf.nest.map_structure(_without_optionals, next(self._iterator))

    def next_loads(self) -> Callable[[int], list[Load]]:
        """Makes the loads of the next global batch."""
        batch = next(self)
        return lambda parts: split(batch, parts)


class _Sent(Load):
    """A batch that the chief sends: `count` of `total` examples, by default all."""

    def __init__(
        self, batch: Structure, count: int | None = None, total: int | None = None
    ) -> None:
        self._batch = tf.nest.map_structure(_as_tensor, batch)
        self._leaves = tf.nest.flatten(self._batch, expand_composites=True)
        present = [leaf for leaf in self._leaves if leaf is not None]
        self._numeric = [t for t in present if t.dtype != tf.string]
        self._strings = [t for t in present if t.dtype == tf.string]
        self.lasting = not self._strings
        all_rows = next((int(t.shape[0]) for t in present if t.shape.rank), 1)
        self.rows = all_rows if count is None else count
        self._total = total or self.rows
        kinds = [type(leaf).__name__ for leaf in tf.nest.flatten(self._batch)]
        structure = repr(tf.nest.map_structure(lambda leaf: 0, self._batch))
        types = tuple((t.dtype.name, t.shape.rank) for t in present)
        self._kind = (structure, tuple(kinds), types)
        self._take([_open(t) for t in present])

    def widen(self, lengths: Lengths) -> None:
        """Leaves the dimensions open by which batches have differed so far."""
        shapes = lengths.widened(self._kind, [spec.shape for spec in self._specs])
        pairs = zip(self._specs, shapes, strict=True)
        self._take([tf.TensorSpec(shape, spec.dtype) for spec, shape in pairs])

    def _take(self, specs: list[Any]) -> None:
        self._specs = specs
        self.resources = [spec for spec in specs if spec.dtype == tf.string]
        self._layout = Layout([spec for spec in specs if spec.dtype != tf.string])
        self.key = (*self._kind, tuple(repr(spec.shape) for spec in specs))

    def box(self, worker: int, numbers: list[int]) -> Array:
        """A box with the batch's numbers, and the step's."""
        arrays = [t.numpy() for t in self._numeric]
        return self._layout.box([*numbers, self.rows or 0, self._total, 0], arrays)

    def resource_values(self, worker: int) -> list[Any]:
        """The batch's strings."""
        return self._strings

    def make_batch(self, resources: list[Any], box: Tensor) -> tuple[Any, Any, Any]:
        """The batch as it was."""
        header, numeric = unbox(box), iter(self._layout.open(box))
        strings = iter(resources)
        filled = [
            leaf if leaf is None else next(strings if leaf.dtype == tf.string else numeric)
            for leaf in self._leaves
        ]
        # The type of a sparse or ragged part has no number of rows: other parts have others.
        like = tf.nest.map_structure(_spec_or_leaf, self._batch)
        batch = tf.nest.pack_sequence_as(like, filled, expand_composites=True)
        return batch, header.count, header.total


def split(batch: Structure, parts: int) -> list[Load]:
    """The loads of a batch in parts, of which some may be empty."""
    if parts == 1:
        return [_Sent(batch)]
    batch = tf.nest.map_structure(_as_tensor, batch)
    slices = [batch_sharding.slice_with_share(batch, part, parts) for part in range(parts)]
    return [
        _Sent(each.batch, int(each.count), int(each.total))
        if isinstance(each, batch_sharding.Slice)
        else _Sent(each)
        for each in slices
    ]


def _without_optionals(leaf: object) -> object:
    """None for what Keras's data sets have in place of None."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def _as_tensor(leaf: Structure) -> Structure:
    if leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return tf.convert_to_tensor(leaf)


def _spec_or_leaf(leaf: Structure) -> Structure:
    spec = batch_sharding.open_spec(leaf)
    return leaf if spec is None else spec


def _open(tensor: Tensor) -> tf.TensorSpec:
    shape = tensor.shape
    return tf.TensorSpec([None, *shape[1:]] if shape.rank else shape, tensor.dtype)


# Data sets that the workers read by themselves.


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
        self.recoveries = recoveries
        # A tensor of the chief: one made on a worker would keep Python waiting for the network.
        self._graph = tf.constant(graph)
        # Traced here: while a worker runs, others may be stopped, whom each new graph waits for.
        self._load, self._iterator, self._first = _functions_of(dataset.element_spec)
        self._copies: dict[int, list[Source]] = {}

    def begin(self) -> Pass:
        """One pass over the data set."""
        return _ReadPass(self, begin_pass(self.dataset))

    def open(self, worker: int, number: int) -> DatasetIterator:
        """An iterator on a worker for a pass; orders that are drawn anew are those of this pass.

        To be called where functions run on that worker.
        """
        lost = self.recoveries(worker)
        copy = take_nearest(self._copies, worker, number, lost)
        copy = copy or Source(lost, self._load(self._graph), 0)
        for _ in range(number - copy.place):
            self._first(copy.source)
        self._copies[worker].append(copy._replace(place=number + 1))
        return self._iterator(copy.source)


class _ReadPass(Pass):
    """One pass: which batch is next, and where each worker's iterator is."""

    def __init__(self, reading: Reading, number: int) -> None:
        self._reading, self._number, self.spec = reading, number, reading.spec
        self.batches = reading.batches
        self._positions = itertools.count()
        self._iterators: dict[int, list[Source]] = {}
        self._own: Iterator[Any] | None = None

    def __next__(self) -> Structure:
        if self._own is None:
            self._own = read_here(self._reading.dataset, self._number)
        return tf.nest.map_structure(_without_optionals, next(self._own))

    def next_loads(self) -> Callable[[int], list[Load]]:
        """Makes the loads of the next batch."""
        position = next(self._positions)
        if 0 <= self._reading.batches <= position:
            raise StopIteration
        return lambda parts: [_ReadLoad(self, position, parts) for _ in range(parts)]

    def iterator(self, worker: int, position: int) -> tuple[Any, int]:
        """A worker's iterator, and how many batches it passes over before it reads a place."""
        lost = self._reading.recoveries(worker)
        found = take_nearest(self._iterators, worker, position, lost)
        found = found or Source(lost, self._reading.open(worker, self._number), 0)
        self._iterators[worker].append(found._replace(place=position + 1))
        return found.source, position - found.place

    def unknown(self, worker: int) -> None:
        """Forgets a worker's iterators, whose places are not known."""
        self._iterators.pop(worker, None)


class _ReadLoad(Load):
    """A batch, or a part of one, that a worker reads."""

    def __init__(self, of: _ReadPass, position: int, parts: int) -> None:
        self._of, self._position, self._parts = of, position, parts
        self._open: dict[int, Any] = {}
        self.resources = [of.spec]
        self.key = ("read", repr(of.spec), parts)

    def box(self, worker: int, numbers: list[int]) -> Array:
        """The numbers of the step, with how many batches it passes over."""
        self._open[worker], skip = self._of.iterator(worker, self._position)
        return Layout([]).box([*numbers, 0, 0, skip], [])

    def resource_values(self, worker: int) -> list[Any]:
        """The worker's iterator."""
        return [self._open[worker]]

    def make_batch(self, resources: list[Any], box: Tensor) -> tuple[Any, Any, Any]:
        """Reads the batch, and cuts the part out."""
        header, [iterator] = unbox(box), resources

        def pass_over(position: Tensor) -> Tensor:
            passed = tf.nest.flatten(iterator.get_next(), True)  # None for a target without loss
            with tf.control_dependencies([each for each in passed if each is not None]):
                return position + 1

        at = tf.while_loop(
            lambda position: position < header.skip, pass_over, [tf.constant(0, tf.int64)]
        )
        with tf.control_dependencies([at]):
            batch = tf.nest.map_structure(_without_optionals, iterator.get_next())
        if self._parts == 1:
            rows = tf.constant(-1, tf.int64)
            return batch, rows, rows
        part = batch_sharding.slice_with_share(batch, header.part, self._parts)
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

    They cannot if the data set runs Python code or ops of another library, such as TensorFlow
    Text's, holds resources of the chief, has an unknown number of batches or another order each
    time, or is made of arrays that are too large to be sent whole. For the arguments see `Reading`.
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
    if len(graph) > _LARGEST or b"PyFunc" in graph or not _is_of_tensorflow(graph):
        return None
    return Reading(dataset, graph, known, recoveries)


def _is_of_tensorflow(graph: bytes) -> bool:
    """Whether all ops of a graph are TensorFlow's own: a worker has loaded no other library."""
    parsed = tf.compat.v1.GraphDef.FromString(graph)
    functions = parsed.library.function
    names = {function.signature.name for function in functions}
    nodes = itertools.chain(parsed.node, *(function.node_def for function in functions))
    others = {node.op for node in nodes} - names
    return all(name.startswith("_") or hasattr(tf.raw_ops, name) for name in others)


_functions: dict[str, list[ConcreteFunction]] = {}


def _functions_of(spec: object) -> list[ConcreteFunction]:
    """Functions of one tensor, made once for each type of batch.

    They make a data set of its graph, begin a pass over it, and draw the random numbers of a pass
    at its start.
    """

    def load(text: Tensor) -> Tensor:
        return tf.raw_ops.DatasetFromGraph(graph_def=text)

    def begin(variant: Tensor) -> DatasetIterator:
        return iter(tf.data.experimental.from_variant(variant, spec))

    def draw(variant: Tensor) -> Tensor:
        leaves = tf.nest.flatten(next(begin(variant)), expand_composites=True)
        with tf.control_dependencies([leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]):
            return tf.constant(True)

    key = repr(spec)
    if key not in _functions:
        text, variant = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.variant)
        _functions[key] = [
            tf.function(each, autograph=False).get_concrete_function(signature)
            for each, signature in ((load, text), (begin, variant), (draw, variant))
        ]
    return _functions[key]


# Data sets of a function that makes one for each worker: each worker reads its own.
#
# A worker that is lost leaves its data set to the others, until it is back.


class ShardedDatasets(DistributedDatasetsFromFunction):  # type: ignore[misc]
    """The data sets of a function, for TensorFlow's coordinator (`stock`) and for `fit`."""

    def __init__(self, stock: Dataset, shards: Callable[[], Shards]) -> None:
        self.__dict__.update(stock.__dict__)
        self._make_shards = shards

    def __iter__(self) -> Iterator[Any]:
        if tf.inside_function():
            return super().__iter__()
        return _ShardPass(self._made)

    @property
    def cardinality(self) -> int:
        """Batches of a pass; negative if there is no end."""
        return self._made.batches

    @functools.cached_property
    def _made(self) -> Shards:
        return self._make_shards()


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


class _ShardPass(Pass):
    """One pass: how far each data set is, and how many of its batches are under way."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.batches = shards.batches
        self._passes = [reading.begin() for reading in shards.readings]
        self._taken = [0] * len(self._passes)
        self._under_way = [0] * len(self._passes)

    def __next__(self) -> Structure:
        for each in self._passes:  # read on the chief, one data set after the other
            try:
                return next(each)
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
        position = self._taken[shard]
        self._taken[shard] += 1
        self._under_way[shard] += 1
        return _ShardLoad(self._passes[shard], position, shard, parts, self._end)

    def _end(self, shard: int) -> None:
        self._under_way[shard] -= 1


class _ShardLoad(_ReadLoad):
    """A batch of one worker's data set; in `sync` the parts count alike."""

    def __init__(
        self, of: Any, position: int, shard: int, parts: int, end: Callable[[int], None]
    ) -> None:
        super().__init__(of, position, 1)
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
