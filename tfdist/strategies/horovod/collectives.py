"""Collectives between processes by Horovod, as a strategy needs them.

Horovod knows a tensor by the name of its operation: the ranks' tensors of one name belong together,
and a name may be under way once at a time. A name here is the collective's place in the outermost
function's graph, so it is the same on all ranks, even if one has traced more functions than
another. Ranks that are at different places of the program therefore meet with tensors of different
shapes, which Horovod reports, instead of waiting for each other.

Horovod's operations are not stateful, so TensorFlow runs those of one graph side by side: the sums
of a step's metrics travel while its gradients are computed. That would bring two of one name
together if a function is called twice, or in a loop. A variable that a collective reads before
and writes after keeps those of one name in the order of the program; others do not wait for them.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._tf.distribute import unordered
from tfdist.comm.carriers import gather_strings
from tfdist.comm.replica_collectives import by_group, grouped
from tfdist.errors import ConfigError
from tfdist.types import DType, ProcessSet, Scalar, Tensor

__all__ = ["Alone", "Members", "Ring", "RingLink", "as_bits", "combine", "from_bits", "not_folded"]

#: The type in which a tensor is added up if Horovod cannot do it in the tensor's own type.
_ADDED_AS = {
    tf.bfloat16: tf.float32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}

#: The type in which the bits of a tensor travel if Horovod does not know the tensor's type.
_CARRIED_AS = {
    tf.bfloat16: tf.uint16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    tf.complex128: tf.float64,
}


#: So many collectives of a loop may be under way at a time. A step has one sum of its gradients,
#: two gathers for each table whose rows it looks up, and its metrics.
_AT_A_TIME = 16


class Ring:
    """The processes of a Horovod job.

    Args:
        hvd: the module `horovod.tensorflow`.

    Raises:
        ValueError: if Horovod has not been initialised.

    Attributes:
        hvd: the module.
        rank: this process's number.
        size: the number of processes.
    """

    def __init__(self, hvd: Any) -> None:
        if not hvd.is_initialized():
            raise ValueError(
                "Horovod has not been initialised, so this process does not know its rank. Make "
                "the strategy by tfdist.strategy('horovod'), or call hvd.init() before."
            )
        self.hvd = hvd
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self._names = _Names()
        with tf.init_scope(), tf.device("CPU:0"):
            self._orders = [
                tf.Variable(0.0, trainable=False, name="tfdist_order") for _ in range(_AT_A_TIME)
            ]
            self._kept = tf.Variable(0.0, trainable=False, name="tfdist_kept")

    def sum(self, tensors: Sequence[Any], groups: int = 1) -> list[Any]:
        """Adds up tensors over the processes.

        Args:
            tensors: dense tensors, of the same shapes and types in all processes.
            groups: in how many groups they travel, each as soon as all its tensors are there.

        Returns:
            The sums, in the order of `tensors`.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        carried = [tf.cast(t, _ADDED_AS.get(t.dtype, t.dtype)) for t in tensors]

        def launch(name: str) -> list[Any]:
            numbers = itertools.count()

            def exchange(group: list[Tensor]) -> list[Any]:
                return self.hvd.grouped_allreduce(
                    [not_folded(tensor) for tensor in group],
                    name=f"{name}.{next(numbers)}",
                    op=self.hvd.Sum,
                    ignore_name_scope=True,
                )

            return by_group(carried, _grouped(carried, groups), exchange)

        sums = self.in_order("sum", launch)
        return [tf.cast(value, t.dtype) for value, t in zip(sums, tensors, strict=True)]

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenates the processes' tensors along the first axis, in the order of their ranks.

        Args:
            tensor: of shape `(n, ...)`; `n` may differ between processes.
        """
        tensor = tf.convert_to_tensor(tensor)
        if tensor.dtype == tf.string:
            return gather_strings(self.gather, tensor)
        return self._sent("gather", tensor, self.hvd.allgather)

    def all_to_all(self, tensor: Tensor, splits: Sequence[int] | Tensor | None) -> Tensor:
        """Sends a part of a tensor to each process.

        Args:
            tensor: of shape `(n, ...)`.
            splits: rows for each process, which add up to `n`; a list of ints or an int32 tensor.

        Returns:
            The rows that all processes sent here, in the order of their ranks.
        """
        return self._sent(
            "alltoall", tensor, lambda bits, **named: self.hvd.alltoall(bits, splits, **named)[0]
        )

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0.

        Args:
            tensor: of the same shape and type in all processes.
        """
        if self.size == 1:
            return tensor
        tensor = tf.convert_to_tensor(tensor)
        value = self._sent(
            "broadcast", tensor, lambda bits, **named: self.hvd.broadcast(bits, 0, **named)
        )
        return tf.ensure_shape(value, tensor.shape)

    def _sent(self, kind: str, tensor: Tensor, send: Callable[..., Any]) -> Tensor:
        """A tensor's bits after `send`, in the tensor's type."""
        tensor = tf.convert_to_tensor(tensor)
        bits = not_folded(as_bits(tensor))

        def launch(name: str) -> list[Any]:
            return [send(bits, name=name, ignore_name_scope=True)]

        (result,) = self.in_order(kind, launch)
        self._keep(result)
        return from_bits(result, tensor.dtype)

    def _keep(self, result: Tensor) -> None:
        """Runs a collective also if nothing uses its result.

        Horovod's ops have no side effects by their registration. So TensorFlow takes one out that
        only control edges lead to, which may be so on one process alone; the others then wait.
        """
        if not tf.executing_eagerly():
            size = tf.size(tf.compat.v1.placeholder_with_default(result, None))
            self._kept.assign(tf.cast(size, tf.float32), read_value=False)

    def in_order(self, kind: str, launch: Callable[[str], list[Any]]) -> list[Any]:
        """Launches operations; if their name may be used again, after those of before.

        Operations that are made in a block of `independently` wait for their inputs alone.
        """
        name = self._names.next(kind)
        if name.is_unique or unordered.is_up:
            return launch(name.text)
        order = self._orders[name.number % _AT_A_TIME]
        with tf.control_dependencies([order.read_value()]):
            results = launch(name.text)
        with tf.control_dependencies(results):
            order.assign(0.0, read_value=False)
        return results


class Members:
    """Horovod, as a `Ring` uses it, on the members of a process set.

    Args:
        hvd: the module `horovod.tensorflow`.
        process_set: a `ProcessSet` that Horovod knows, of which this process is a member.
    """

    def __init__(self, hvd: Any, process_set: ProcessSet) -> None:
        self._hvd, self._process_set = hvd, process_set

    def is_initialized(self) -> bool:
        """Whether Horovod has been initialised."""
        return bool(self._hvd.is_initialized())

    def rank(self) -> int:
        """This process's number among the members."""
        return int(self._process_set.rank())

    def size(self) -> int:
        """The number of members."""
        return int(self._process_set.size())

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._hvd, name)
        if not callable(member):
            return member
        return functools.partial(member, process_set=self._process_set)


class Alone:
    """A `Ring` of one process, which has nobody to exchange with."""

    rank = 0
    size = 1

    def sum(self, tensors: Sequence[Any], groups: int = 1) -> list[Any]:
        """See `Ring.sum`."""
        del groups
        return list(tensors)

    def gather(self, tensor: Tensor) -> Tensor:
        """See `Ring.gather`."""
        return tensor

    def all_to_all(self, tensor: Tensor, splits: Sequence[int] | Tensor | None) -> Tensor:
        """See `Ring.all_to_all`."""
        del splits
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """See `Ring.broadcast`."""
        return tensor


class _Name(NamedTuple):
    """The name of a collective.

    Attributes:
        text: the name.
        number: the place among the collectives of the outermost function.
        is_unique: whether no other collective has the name at the same time.
    """

    text: str
    number: int
    is_unique: bool


class _Names:
    """Hands out names of operations."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def next(self, kind: str) -> _Name:
        """The name for the next collective of the function that is being traced."""
        if tf.executing_eagerly():
            return _Name(f"tfdist.eager.{kind}", 0, is_unique=True)
        inner = graph = tf.compat.v1.get_default_graph()
        while getattr(getattr(graph, "outer_graph", None), "building_function", False):
            graph = graph.outer_graph
        with self._lock:
            number = self._counts.get(graph, 0)
            self._counts[graph] = number + 1
        if inner is graph:
            return _Name(f"tfdist.{number}.{kind}", number, is_unique=True)
        return _Name(f"tfdist.inner.{number}.{kind}", number, is_unique=False)


def _grouped(tensors: Sequence[Any], groups: int) -> list[list[int]]:
    """Indices of tensors that travel together: of one type, and about as large as other groups."""
    result = []
    for group in grouped(tensor.dtype for tensor in tensors):
        sizes = [tensors[i].shape.num_elements() or 1 for i in group]
        bound, filled = sum(sizes) / groups, 0
        parts: list[list[int]] = [[]]
        for i, size in zip(group, sizes, strict=True):
            if parts[-1] and filled + size / 2 > bound * len(parts):
                parts.append([])
            parts[-1].append(i)
            filled += size
        result += parts
    return result


def not_folded(tensor: Tensor) -> Tensor:
    """Keeps TensorFlow from computing a collective of a constant once, while it optimizes."""
    if tf.executing_eagerly():
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, tensor.shape)


def as_bits(tensor: Tensor) -> Tensor:
    """A tensor's bits in a type that Horovod knows."""
    carrier = _CARRIED_AS.get(tensor.dtype)
    return tensor if carrier is None else tf.bitcast(tensor, carrier)


def from_bits(bits: Tensor, dtype: DType) -> Tensor:
    """The tensor of type `dtype` that `as_bits` was given."""
    return bits if bits.dtype == dtype else tf.bitcast(bits, dtype)


# Adasum: adds orthogonal gradients and averages parallel ones (Maleki et al., arXiv:2006.02924).
#
# Of two gradients a and b, layer by layer::
#
# adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b
#
# and of p = 2**k gradients the adasum of the adasums of both halves. Horovod's own kernels need
# MPI or NCCL; this one needs an all-gather only, at the price of p gradients in memory.


def combine(ring: Ring, gradients: Sequence[Any]) -> list[Any]:
    """The Adasum of all processes' gradients.

    Args:
        ring: the processes; their number is a power of two.
        gradients: this process's, one dense floating-point tensor for each weight.

    Raises:
        ConfigError: if the number of processes is not a power of two.
    """
    if ring.size & (ring.size - 1):
        raise ConfigError(
            f"Adasum combines gradients in pairs, and {ring.size} processes are no power of two. "
            "Start 2, 4, 8, ... processes, or choose reduction='mean'."
        )
    flat = tf.concat([tf.cast(tf.reshape(g, [-1]), tf.float32) for g in gradients], 0)
    everyone = tf.split(ring.gather(flat), ring.size)
    sizes = [tf.size(g) for g in gradients]
    level = [tf.split(each, sizes) for each in everyone]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [[_of_two(a, b) for a, b in zip(*pair, strict=True)] for pair in pairs]
    return [
        tf.cast(tf.reshape(combined, tf.shape(g)), g.dtype)
        for combined, g in zip(level[0], gradients, strict=True)
    ]


def _of_two(a: Tensor, b: Tensor) -> Tensor:
    product = tf.reduce_sum(a * b)

    def kept(x: Tensor) -> Tensor:
        return 1.0 - tf.math.divide_no_nan(product, 2.0 * tf.reduce_sum(x * x))

    return kept(a) * a + kept(b) * b


# The processes of a Horovod job, as a gradient exchange sees them.


class RingLink:
    """See `tfdist.comm.replica_collectives.Link`.

    Args:
        ring: the processes.
    """

    def __init__(self, ring: Ring | Alone) -> None:
        self._ring = ring
        self.count: int = ring.size
        self.index: Scalar = ring.rank

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """See `Link.sum`."""
        return self._ring.sum(tensors) if tensors else []

    def gather(self, tensor: Tensor) -> Tensor:
        """See `Link.gather`."""
        rows = tensor.shape[0] and tensor.shape[0] * self.count
        return tf.ensure_shape(self._ring.gather(tensor), [rows, *tensor.shape[1:]])

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """See `Link.all_to_all`."""
        received = self._ring.all_to_all(tensor, [1] * self.count)
        return tf.ensure_shape(received, tensor.shape)
