"""Distributes a data set over the replicas.

Every worker reads the same global batches and takes its own slice of each: N replicas see the
examples, the batches and the order that one device sees, and every worker takes the same number of
steps. File sharding, if it is asked for, is TensorFlow's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._tf.data import is_debugged
from tfdist.errors import ConfigError
from tfdist.types import Scalar, Structure, Tensor

#: The error of a batch that has no examples to be divided.
_UNEQUAL_ROWS = (
    "The components of a batch have different numbers of rows, so replicas cannot take their "
    "slices of it. Give all the same first dimension, such as one graph with its edges to an "
    "example (padded, or as a RaggedTensor), or train on one replica."
)

#: Parts of a batch that are listed one by one, at most.
_LISTED = 8


class Slice(NamedTuple):
    """A replica's slice of a global batch.

    Attributes:
        batch: the examples, at least one.
        count: how many of them count; 0 if the replica got none and `batch` is a stand-in.
        total: examples in the global batch.
    """

    batch: Structure
    count: Tensor  # type: ignore[assignment]  # `tuple.count` is not used.
    total: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """The slices of a global batch that belong to this process.

    Attributes:
        workers: processes that read the data.
        worker: this process's number among them.
        local: replicas in this process.
    """

    workers: int
    worker: int
    local: int

    @property
    def replicas(self) -> int:
        """All replicas."""
        return self.workers * self.local

    def positions(self) -> list[int]:
        """Positions in the global batch of this process's replicas, in order.

        Replica `l` of worker `w` takes slice `l * workers + w`: the order in which Keras puts the
        replicas' predictions together again.
        """
        return [replica * self.workers + self.worker for replica in range(self.local)]


def slice_bounds(size: Any, position: Tensor | int, parts: int) -> tuple[Any, Any]:
    """Start and end of one of `parts` contiguous slices whose sizes differ by one at most.

    Args:
        size: number of examples; an int or an integer tensor.
        position: which slice; an int or an integer tensor.
        parts: number of slices.
    """
    small, extra = size // parts, size % parts
    if isinstance(size, int) and isinstance(position, int):
        start = position * small + min(position, extra)
        return start, start + small + (1 if position < extra else 0)
    start = position * small + tf.minimum(position, extra)
    return start, start + small + tf.cast(position < extra, start.dtype)


def split_in_words(batch: int, parts: int) -> str:
    """The split of a global batch into parts whose sizes differ by one at most, in words."""
    each, more = divmod(batch, parts)
    if parts <= _LISTED:
        return " + ".join(str(each + (number < more)) for number in range(parts))
    sizes = f"{each} or {each + 1}" if more else f"{each}"
    return f"{sizes} on each of {parts}"


def slice_batch(batch: Structure, position: Tensor | int, parts: int) -> Structure:
    """One slice of every component of a batch; scalars and None are kept whole."""
    rows = _rows_of(batch)
    if rows is None:
        return batch
    start, end = slice_bounds(rows, position, parts)
    return tf.nest.map_structure(lambda leaf: _slice_leaf(leaf, start, end), batch)


def slice_with_share(batch: Structure, position: Tensor | int, parts: int) -> Slice | Structure:
    """One slice and its count; an empty one is stood in for by the batch's first example.

    A batch without any component of shape `(batch, ...)` is kept as it is.
    """
    rows = _rows_of(batch)
    if rows is None:
        return batch
    if tf.executing_eagerly() and isinstance(position, int):
        return _slice_of_values(batch, position, parts)
    rows = tf.cast(rows, tf.int64)
    start, end = slice_bounds(rows, position, parts)
    count = end - start
    first, last = tf.where(count > 0, start, 0), tf.where(count > 0, end, 1)
    part = tf.nest.map_structure(lambda leaf: _slice_leaf(leaf, first, last), batch)
    return Slice(part, count, rows)


def _slice_of_values(batch: Structure, position: int, parts: int) -> Slice:
    """`slice_with_share` of arrays and eager tensors, without an operation for each number."""
    rows = rows_of(batch)
    assert rows is not None
    start, end = slice_bounds(rows, position, parts)
    first, last = (start, end) if end > start else (0, 1)
    part = tf.nest.map_structure(lambda leaf: _slice_leaf(leaf, first, last), batch)
    return Slice(part, tf.constant(end - start, tf.int64), tf.constant(rows, tf.int64))


def _rows_of(batch: Structure) -> Tensor | int | None:
    """The number of examples, which all components have that have a batch dimension.

    Raises:
        ConfigError: if components are known to have different numbers of rows. Others end in
            TensorFlow's InvalidArgumentError, with the same message, when they are read.
    """
    leaves = [(leaf, _rows(leaf)) for leaf in tf.nest.flatten(batch)]
    counts = [count for _, count in leaves if count is not None]
    static = [leaf.shape[0] for leaf, count in leaves if count is not None]
    known = {int(count) for count in static if count is not None}
    if len(known) > 1:
        raise ConfigError(f"{_UNEQUAL_ROWS} They have {', '.join(map(str, sorted(known)))} rows.")
    if len(counts) < 2 or None not in static:
        return counts[0] if counts else None
    together = tf.stack([tf.cast(count, tf.int64) for count in counts])
    alike = tf.debugging.Assert(
        tf.reduce_all(tf.equal(together, together[0])), [_UNEQUAL_ROWS, "Rows:", together]
    )
    with tf.control_dependencies([] if alike is None else [alike]):
        return tf.identity(together[0])


def _rows(leaf: Any) -> Tensor | int | None:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if not tf.is_tensor(leaf) or tf.executing_eagerly():
        return int(leaf.shape[0]) if getattr(leaf, "shape", ()) else None
    if leaf.shape.rank == 0:
        return None
    return tf.shape(leaf, tf.int64)[0]


def rows_of(batch: Structure) -> int | None:
    """Examples in a batch of arrays or eager tensors; None if nothing has shape `(batch, ...)`."""
    rows = _rows_of(batch)
    return None if rows is None else int(rows)


def open_spec(leaf: Structure) -> tf.TypeSpec | None:
    """The type of a sparse or ragged tensor of any number of rows; None for other leaves."""
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    if isinstance(leaf, tf.RaggedTensor):
        shape, splits = [None, *leaf.shape[1:]], leaf.row_splits.dtype
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, splits)
    return None


def _slice_leaf(leaf: Any, start: Scalar, end: Scalar) -> Structure:
    if _rows(leaf) is None:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        rest = leaf.dense_shape[1:]
        begin = tf.concat([tf.cast([start], tf.int64), tf.zeros_like(rest)], 0)
        part = tf.sparse.slice(leaf, begin, tf.concat([tf.cast([end - start], tf.int64), rest], 0))
        part.set_shape([None, *leaf.shape[1:]])  # layers are built from it
        return part
    return leaf[start:end]


def policy_of(dataset: tf.data.Dataset) -> tf.data.experimental.AutoShardPolicy:
    """The auto-shard policy that the data set's options ask for."""
    return dataset.options().experimental_distribute.auto_shard_policy


def local_dataset(
    dataset: tf.data.Dataset, shard: Shard, shares: bool = False, preview: bool = False
) -> tf.data.Dataset:
    """This process's part of a data set of global batches.

    Args:
        dataset: yields global batches, the same ones in the same order on every worker.
        shard: this process's place.
        shares: whether each slice is to carry its count, as a `Slice`.
        preview: whether the first batch comes first, in `preview_reads` times `shard.local`
            elements to be read and compared with those of other workers, ahead of this process's
            own slices.

    Returns:
        A data set with `shard.local` elements for each global batch, one a replica. Batch sizes are
        static only if every slice of every batch has the same size.
    """
    if shard.replicas == 1 and not preview:
        return dataset
    spec = dataset.element_spec
    size = _even_batch(spec, shard.replicas)

    def slice_at(position: Tensor, whole: Structure) -> Structure:
        part = (slice_with_share if shares else slice_batch)(whole, position, shard.replicas)
        return _with_static_batch(part, size)

    key = (_form_of(spec), shard, shares, preview, is_debugged())
    if shard.local == 1 and not preview:
        own_slice = _traced_once(key, lambda: _own_slice(slice_at, shard))
        # tf.data hands a plain tuple to a function as several arguments, a namedtuple as one.
        several = type(spec) is tuple

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def slice_of(*batch: Structure) -> Structure:
            return own_slice(batch if several else batch[0])

        slices = dataset.map(slice_of, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        spread = _traced_once(key, lambda: _Spread(slice_at, shard, preview, shares, size))
        slices = dataset.enumerate().flat_map(spread.slices)
    options = tf.data.Options()
    options.deterministic = True
    return slices.with_options(options).prefetch(tf.data.AUTOTUNE)


def preview_reads(dataset: tf.data.Dataset, shard: Shard) -> int:
    """The reads of a replica of this process until it has passed the preview.

    Args:
        dataset: yields global batches.
        shard: this process's place.
    """
    is_open = _even_batch(dataset.element_spec, shard.replicas) is None
    return 1 if shard.local == 1 and is_open else shard.workers


#: Functions that slice batches, which take longer to trace than many steps to run, with all that
#: they depend on; the newest `_KEPT`.
_traced: dict[object, Any] = {}
_KEPT = 64


def _traced_once(key: tuple[object, ...], make: Callable[[], Any]) -> Any:
    """`make()`, or what was made for an equal key before."""
    if not tf.executing_eagerly():
        return make()  # It belongs to a graph.
    try:
        found = _traced.get(key)
    except TypeError:  # A container of the program's own that has no hash.
        return make()
    if found is None:
        found = _traced[key] = make()
        if len(_traced) > _KEPT:
            del _traced[next(iter(_traced))]
    return found


def _form_of(spec: Structure) -> object:
    """The containers of a nest and its leaves, with a hash."""
    if isinstance(spec, Mapping):
        return type(spec), tuple((key, _form_of(each)) for key, each in spec.items())
    if isinstance(spec, (tuple, list)):
        return type(spec), tuple(map(_form_of, spec))
    return spec


def _own_slice(
    slice_at: Callable[[Tensor, Structure], Structure], shard: Shard
) -> Callable[[Structure], Structure]:
    """A function from a global batch to the slice of this process's only replica."""

    def own_slice(whole: Structure) -> Structure:
        return slice_at(tf.constant(shard.positions()[0], tf.int64), whole)

    traced: Callable[[Structure], Structure] = tf.function(own_slice, autograph=False)
    return traced


class _Spread:
    """Makes a data set of a global batch: of this process's slices.

    Args:
        slice_at: gives the slice of a batch at a position.
        shard: this process's place.
        preview: whether the batch of index 0 comes first.
        shares: whether each slice is a `Slice`.
        size: the size of all slices, if it is known to be the same.
    """

    def __init__(
        self,
        slice_at: Callable[[Tensor, Structure], Structure],
        shard: Shard,
        preview: bool,
        shares: bool,
        size: int | None,
    ) -> None:
        self._slice_at, self._shard, self._preview = slice_at, shard, preview
        self._shares, self._size = shares, size
        self._variant = tf.function(self._variant_at, autograph=False)
        self._spec: Structure = None
        self._read: tf.data.Dataset | None = None

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def slices(self, index: Tensor, whole: Structure) -> tf.data.Dataset:
        """The slices of the batch of an index."""
        # The debug mode of `tf.data` runs this eagerly, and what it calls again.
        make = self._variant_at if tf.executing_eagerly() else self._variant
        variant = make(index, whole)
        return tf.data.experimental.from_variant(variant, self._spec)

    def _variant_at(self, index: Tensor, whole: Structure) -> Tensor:
        # A function that an iterator calls takes longer to set up than some small steps, so slices
        # are made here where that can be.
        is_first = tf.cast(tf.equal(index, 0), tf.int64)
        if self._shard.local > 1:
            all_of_first = tf.range(is_first * (self._shard.replicas if self._preview else 0))
            own = tf.constant(self._shard.positions(), tf.int64)
            return self._noted(self._at(tf.concat([all_of_first, own], 0), whole), whole)
        slices = self._own(whole)
        if self._preview:
            first = self._whole(whole)
            slices = first.take(is_first * first.cardinality()).concatenate(slices)
        return self._noted(slices, whole)

    def _noted(self, slices: tf.data.Dataset, whole: Structure) -> Tensor:
        if self._spec is None:
            self._spec = _of_known_shapes(slices.element_spec, whole)
        self._read = slices  # In the debug mode, its functions live as long as it does.
        return tf.data.experimental.to_variant(slices)

    def _at(self, positions: Tensor, whole: Structure) -> tf.data.Dataset:
        each = tf.data.Dataset.from_tensor_slices(positions)
        return each.map(lambda position: self._slice_at(position, whole))

    def _own(self, whole: Structure) -> tf.data.Dataset:
        # The position must not be known when it is traced, or the shapes may be others than those
        # of the whole batch.
        own = tf.constant(self._shard.positions()[0], tf.int64)
        position = tf.compat.v1.placeholder_with_default(own, [])
        return tf.data.Dataset.from_tensors(self._slice_at(position, whole))

    def _whole(self, whole: Structure) -> tf.data.Dataset:
        """A batch as one slice; in slices of the size that all have, if there is one."""
        rows = _rows_of(whole)
        if rows is None or not self._shares:
            share: Structure = whole
        else:
            share = Slice(whole, tf.cast(rows, tf.int64), tf.cast(rows, tf.int64))
        if self._size is None:
            return tf.data.Dataset.from_tensors(share)
        if isinstance(share, Slice):
            share = share._replace(count=tf.constant(self._size, tf.int64))
        return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(self._divided, share))

    def _divided(self, leaf: Tensor) -> Tensor:
        """The slices of a component, stacked; a number as often as there are slices."""
        parts = self._shard.replicas
        if leaf.shape.rank == 0:
            return tf.repeat(leaf[tf.newaxis], parts)
        divided = tf.reshape(leaf, tf.concat([[parts, self._size], tf.shape(leaf)[1:]], 0))
        divided.set_shape([parts, self._size, *leaf.shape[1:]])
        return divided


def _of_known_shapes(spec: Structure, whole: Structure) -> Structure:
    """The type of slices of a batch: a data set of one element forgets shapes of sparse tensors."""
    if isinstance(spec, Slice):
        return spec._replace(batch=_of_known_shapes(spec.batch, whole))

    def known(leaf: Structure, own: tf.TypeSpec) -> tf.TypeSpec:
        return open_spec(leaf) if isinstance(leaf, tf.SparseTensor) else own

    return tf.nest.map_structure(known, whole, spec)


def _even_batch(spec: Structure, replicas: int) -> int | None:
    """The size of every replica's slice, if it is known to be the same for all, or None."""
    sizes = {
        each.shape[0]
        for each in tf.nest.flatten(spec)
        if isinstance(each, tf.TensorSpec) and each.shape.rank
    }
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    return None if size is None or size % replicas else size // replicas


def _with_static_batch(part: Structure, size: int | None) -> Structure:
    if size is None:
        return part

    def fix(leaf: Structure) -> Structure:
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
            return tf.ensure_shape(leaf, [size, *leaf.shape[1:]])
        return leaf

    return tf.nest.map_structure(fix, part)
