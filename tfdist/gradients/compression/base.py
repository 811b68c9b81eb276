"""The interface of compressions: the transport of gradients, and the memory between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from tfdist.types import DType, Tensor

if TYPE_CHECKING:
    from tfdist.comm.replica_collectives import Link

__all__ = ["Compression", "Memory", "Memoryless", "all_finite", "error_memory", "unless_broken"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """A variable that a compression needs.

    Attributes:
        name: its name, unique within a compression.
        shape: its static shape, which does not depend on the number of replicas.
        dtype: its type.
        shared: whether it is the same on all replicas. Otherwise each has its own, and only their
            sum matters, as that of errors fed back.
        initial: makes its first value, the same on all replicas.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    shared: bool
    initial: Callable[[], Any]


class Compression(Protocol):
    """Sums gradients over the replicas, perhaps about.

    With error feedback (arXiv:1901.09847), what a step leaves out is in a memory and added to the
    next step's gradients: over the replicas, the sum of the next errors is the sum of gradients and
    present errors less the result, to rounding. If a result has a NaN or an infinity, the
    memories keep their values, so that a step that is skipped for it leaves nothing behind.
    """

    def memory(self, specs: Sequence[tf.TensorSpec], replicas: int) -> list[Memory]:
        """The variables that it needs.

        Args:
            specs: static shapes and floating types of the gradients, in their order.
            replicas: the number of replicas.
        """

    def __call__(
        self, link: Link, values: Sequence[Any], memory: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Sums gradients over the replicas.

        Args:
            link: the replicas; all make the same calls.
            values: this replica's dense gradients, weighted such that their sum is wanted.
            memory: the memories' present values, in the order of `memory()`.

        Returns:
            The sums, the same on all replicas to the bit, in shapes and types of `values`; and the
            memories' next values.
        """


class Memoryless:
    """A compression that keeps nothing from step to step."""

    def memory(self, specs: Sequence[tf.TensorSpec], replicas: int) -> list[Memory]:
        """See `Compression.memory`."""
        del specs, replicas
        return []


def error_memory(length: int, dtype: DType) -> Memory:
    """Errors of `length` values, zero at first, which each replica has of its own."""
    return Memory("error", (length,), dtype, False, lambda: tf.zeros([length], dtype))


def all_finite(*tensors: Iterable[Tensor]) -> Tensor:
    """Whether tensors have neither NaN nor infinity: a scalar bool."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


def unless_broken(finite: Tensor, following: Sequence[Any], present: Sequence[Any]) -> list[Any]:
    """Memories' next values, or the present ones after a result with a NaN or an infinity.

    Args:
        finite: whether the result has none, the same on all replicas.
        following: the next values.
        present: the present ones.
    """

    def move_on() -> list[Any]:
        return list(following)

    def stay() -> list[Any]:
        return list(present)

    return list(tf.cond(finite, move_on, stay))
