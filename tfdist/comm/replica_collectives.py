"""The replicas as one of them sees them: what a gradient exchange sends and receives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import tensorflow as tf

from tfdist._tf.collectives import all_to_all, gather_alike, gather_by
from tfdist._tf.distribute import independently
from tfdist._tf.lines import Line
from tfdist.comm.batch_dependence import Kind, rows_of
from tfdist.errors import EquivalenceWarning
from tfdist.types import Gradient, IndexedSlices, Scalar, Strategy, Tensor
from tfdist.utils.messages import warn

if TYPE_CHECKING:
    from typing_extensions import TypeIs


__all__ = [
    "ALONE_BYTES",
    "CountedLink",
    "LineLink",
    "Link",
    "Piece",
    "ReplicaLink",
    "alone",
    "by_group",
    "grouped",
    "joined",
    "pieces_of",
    "sent_by_ring",
    "size_of",
    "sum_over_replicas",
    "with_distinct_rows",
]


#: Dense tensors of as many bytes are exchanged by themselves between CPUs: to pack them costs more
#: than an exchange of their own, and memory for a copy of all.
ALONE_BYTES = 1 << 20


# Sums over the replicas, from within a replica.


def sum_over_replicas(values: list[Any]) -> list[Any]:
    """Adds up tensors over all replicas.

    Dense tensors of one type travel together; between CPUs large ones travel by themselves, each
    when it has been computed. Sparse gradients stay sparse. The rows of lookups by example are put
    one after the other, as in one process's gradient of the whole batch. A lookup
    that does not depend on the batch, such as a position embedding, has each row once on one
    process and on each replica: those rows are added, and so are those of lookups that make the ids
    of the batch unique. Optimizers that square gradients row by row distinguish them.

    Args:
        values: dense tensors and `IndexedSlices`, the same number and types on each replica.

    Returns:
        The sums, in the order of `values`.

    Raises:
        tf.errors.InvalidArgumentError: when a step runs, if a lookup that does not depend on the
            batch has other rows on another replica.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return values
    pieces = [pieces_of(value) for value in values]
    flat = [piece.value for each in pieces for piece in each]
    add = functools.partial(context.all_reduce, tf.distribute.ReduceOp.SUM)
    with independently():
        sums = {i: add(flat[i]) for i in alone(flat)}
    rest = [i for i in range(len(flat)) if i not in sums]
    groups = grouped((is_sparse(flat[i]), flat[i].dtype) for i in rest)
    sums.update(zip(rest, by_group([flat[i] for i in rest], groups, add), strict=True))
    supply = iter(sums[i] for i in range(len(flat)))
    replicas = context.num_replicas_in_sync
    return [joined(each, [next(supply) for _ in each], replicas) for each in pieces]


def alone(values: Sequence[Any]) -> list[int]:
    """The indices of the values that `sum_over_replicas` exchanges by themselves."""
    if "GPU" in tf.distribute.get_strategy().extended.worker_devices[0]:
        return []
    large = (not is_sparse(each) and size_of(each) >= ALONE_BYTES for each in values)
    return [i for i, is_large in enumerate(large) if is_large]


def grouped(keys: Iterable[Any]) -> list[list[int]]:
    """The indices of equal keys, in the order in which the keys come first."""
    groups: dict[Any, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def by_group(
    values: Sequence[Any],
    groups: Iterable[Sequence[int]],
    exchange: Callable[[list[Any]], Sequence[Any]],
) -> list[Any]:
    """The results of an exchange of each group of values, in the order of the values.

    Args:
        values: such as tensors.
        groups: the indices of those that are exchanged together; each value is in one group.
        exchange: returns a result for each of its values.
    """
    results: dict[int, Any] = {}
    for group in groups:
        results.update(zip(group, exchange([values[i] for i in group]), strict=True))
    return [results[i] for i in range(len(values))]


class Piece(NamedTuple):
    """A gradient, or some rows of a sparse one.

    Attributes:
        value: a dense tensor or `IndexedSlices`.
        kind: the kind of its rows.
    """

    value: Gradient
    kind: Kind = Kind.OWN


def is_sparse(value: object) -> TypeIs[IndexedSlices]:
    """Whether a gradient has the rows of a table only."""
    return isinstance(value, tf.IndexedSlices)


def pieces_of(value: Gradient) -> list[Piece]:
    """A gradient in the pieces that are to be summed over the replicas."""
    if not is_sparse(value):
        return [Piece(value)]
    if not tf.is_tensor(value.indices):
        indices = tf.convert_to_tensor(value.indices)
        return pieces_of(tf.IndexedSlices(value.values, indices, value.dense_shape))
    if hasattr(value.indices, "numpy"):
        _warn_of_eager_rows()
        return [Piece(value)]
    parts = rows_of(value.indices)
    kinds = [part.kind for part in parts]
    if len(parts) == 1 or {*kinds} in ({Kind.COMMON}, {Kind.OWN}):
        return [Piece(value, kinds[0])]
    sizes = tf.stack([tf.size(part.like) for part in parts])
    values = tf.split(value.values, sizes, num=len(parts))
    indices = tf.split(value.indices, sizes, num=len(parts))
    pieces: dict[tuple[Kind, int], list[Any]] = {}
    for number, (rows, row_indices, kind) in enumerate(zip(values, indices, kinds, strict=True)):
        # Rows are distinct within one lookup: those of two come twice.
        key = (kind, number if kind is Kind.DISTINCT else 0)
        pieces.setdefault(key, []).append(tf.IndexedSlices(rows, row_indices, value.dense_shape))
    return [Piece(_concatenated(each), kind) for (kind, _), each in pieces.items()]


def joined(pieces: list[Piece], gathered: list[Any], replicas: int) -> Gradient:
    """The sum of a gradient over the replicas.

    Args:
        pieces: the result of `pieces_of`.
        gathered: for each piece the sum of a dense tensor, or the rows of all replicas.
        replicas: the number of replicas.
    """

    def total(piece: Piece, rows: Any) -> Any:
        if piece.kind is Kind.COMMON:
            return _added(rows, replicas)
        return with_distinct_rows(rows) if piece.kind is Kind.DISTINCT else rows

    whole = _concatenated([total(*each) for each in zip(pieces, gathered, strict=True)])
    own = pieces[0].value
    if not (is_sparse(whole) and is_sparse(own)):
        return whole
    # TensorFlow's exchange hides the shapes, by which Keras's Muon decides while it is traced.
    rows = tf.ensure_shape(whole.values, [None, *own.values.shape[1:]])
    return tf.IndexedSlices(rows, whole.indices, own.dense_shape)


def with_distinct_rows(slices: IndexedSlices) -> IndexedSlices:
    """`IndexedSlices` in which each row comes once, with the sum of its values."""
    indices, segments = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, segments, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _added(gathered: IndexedSlices, replicas: int) -> IndexedSlices:
    """Adds the replicas' rows, of which all have the same."""
    by_replica = tf.reshape(gathered.indices, [replicas, -1])
    alike = tf.debugging.Assert(
        tf.reduce_all(by_replica == by_replica[:1]),
        [
            "Rows that are looked up whatever the batch is differ from replica to replica, so that "
            "their gradients cannot be added. Look up rows that depend on the batch, or the same "
            "rows on each replica."
        ],
    )
    with tf.control_dependencies([alike] if alike is not None else []):
        indices = tf.identity(by_replica[0])
    shape = tf.concat([[replicas, -1], tf.shape(gathered.values)[1:]], 0)
    values = tf.reduce_sum(tf.reshape(gathered.values, shape), 0)
    return tf.IndexedSlices(values, indices, gathered.dense_shape)


def _concatenated(slices: list[Any]) -> Gradient:
    if len(slices) == 1:
        return slices[0]
    values = tf.concat([each.values for each in slices], 0)
    indices = tf.concat([each.indices for each in slices], 0)
    return tf.IndexedSlices(values, indices, slices[0].dense_shape)


def _warn_of_eager_rows() -> None:
    warn(
        "A step that runs eagerly (run_eagerly=True) does not show whether the rows that it looks "
        "up depend on the batch. They are taken to: a lookup that does not, such as a position "
        "embedding, counts once for each replica in optimizers that square gradients. Leave "
        "run_eagerly out to train as one process does.",
        EquivalenceWarning,
    )


class Link(Protocol):
    """The replicas, in the context of one of them.

    All replicas make the same calls in the same order, on tensors of the same static shapes.

    Attributes:
        count: number of replicas.
        index: this replica's number, an int or a scalar int32 tensor.
    """

    count: int
    index: Scalar

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """The sums of dense tensors over the replicas, in the order of `tensors`."""

    def gather(self, tensor: Tensor) -> Tensor:
        """The replicas' tensors of shape `(n, ...)` one after the other: `(count * n, ...)`."""

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Sends row `i` of a tensor of shape `(count, n)` to replica `i`; what came, by sender."""


class ReplicaLink:
    """The replicas of a strategy of TensorFlow's collectives.

    Args:
        strategy: the strategy, in a replica context of which this is made.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.count: int = strategy.num_replicas_in_sync
        self.index: Scalar = tf.distribute.get_replica_context().replica_id_in_sync_group

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """See `Link.sum`."""
        return sum_over_replicas(list(tensors)) if tensors else []

    def gather(self, tensor: Tensor) -> Tensor:
        """See `Link.gather`."""
        return tensor if self.count == 1 else gather_alike(self._strategy, tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """See `Link.all_to_all`."""
        return tensor if self.count == 1 else all_to_all(self._strategy, tensor)


class LineLink:
    """The processes along an axis of a mesh, of which each has one device.

    Args:
        line: the processes.
    """

    def __init__(self, line: Line) -> None:
        self.count: int = line.workers
        self.index: Scalar = line.worker
        self._launcher = line.operations._launchers[0]

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """See `Link.sum`."""
        return [self._launcher.all_reduce(tensor) for tensor in tensors]

    def gather(self, tensor: Tensor) -> Tensor:
        """See `Link.gather`."""
        return gather_by(self._launcher, tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """See `Link.all_to_all`."""
        every = tf.reshape(self.gather(tensor), [self.count, self.count, -1])
        return every[:, self.index]


class CountedLink:
    """A link that counts the bytes that this replica sends.

    An all-reduce counts as a ring's; see `sent_by_ring`.

    Args:
        link: the link that sends them.

    Attributes:
        sent: bytes that one run of all functions traced so far sends.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.count = link.count
        self.index = link.index
        self.sent = 0.0

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """See `Link.sum`."""
        self.sent += sum(sent_by_ring(tensor, self.count) for tensor in tensors)
        return self._link.sum(tensors)

    def gather(self, tensor: Tensor) -> Tensor:
        """See `Link.gather`."""
        self.sent += size_of(tensor) * (self.count - 1)
        return self._link.gather(tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """See `Link.all_to_all`."""
        self.sent += size_of(tensor) * (self.count - 1) / self.count
        return self._link.all_to_all(tensor)


def sent_by_ring(tensor: Tensor, count: int) -> float:
    """Bytes that a replica of a ring sends for an all-reduce: 2 n (p - 1) / p of n over p.

    Args:
        tensor: a dense tensor of static shape.
        count: the replicas.
    """
    return size_of(tensor) * 2 * (count - 1) / count


def size_of(tensor: Tensor) -> int:
    """The bytes of a dense tensor of static shape; 0 if the shape is not known."""
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)
