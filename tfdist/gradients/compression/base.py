"""The interface of compressions, and what they share: flat vectors, plain sums, fed-back errors."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.comm.replica_collectives import Link
from tfdist.types import DType, Tensor

__all__ = [
    "Compression",
    "Layout",
    "Memory",
    "all_finite",
    "error_memory",
    "parts_for",
    "sum_plainly",
    "unless_broken",
]


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


class Compression(ABC):
    """Sums gradients over the replicas, perhaps about.

    With error feedback (arXiv:1901.09847), what a step leaves out is in a memory and added to the
    next step's gradients: over the replicas, the sum of the next errors is the sum of gradients and
    present errors less the result, to rounding. If a result has a NaN or an infinity, the
    memories keep their values, so that a step that is skipped for it leaves nothing behind.
    """

    def memory(self, specs: Sequence[tf.TensorSpec]) -> list[Memory]:
        """The variables that it needs; by default none.

        Args:
            specs: static shapes and floating types of the gradients, in their order.
        """
        del specs
        return []

    @abstractmethod
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


def error_memory(length: int, dtype: DType) -> Memory:
    """Errors of `length` values, zero at first, which each replica has of its own."""
    return Memory("error", (length,), dtype, False, lambda: tf.zeros([length], dtype))


def all_finite(*tensors: Iterable[Tensor]) -> Tensor:
    """Whether tensors have neither NaN nor infinity: a scalar bool."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


def unless_broken(finite: Tensor, following: Sequence[Any], present: Sequence[Any]) -> list[Any]:
    """Memories' next values, or the present ones after a result with a NaN or an infinity."""
    return list(tf.cond(finite, lambda: list(following), lambda: list(present)))


def sum_plainly(link: Link, values: Sequence[Any]) -> list[Any]:
    """The sums of tensors, by one call; those of 16 bits travel as float32, which links can add."""
    if not values:
        return []
    halves = (tf.float16, tf.bfloat16)
    sent = [tf.cast(each, tf.float32) if each.dtype in halves else each for each in values]
    return [
        tf.cast(total, value.dtype) for total, value in zip(link.sum(sent), values, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of tensors in one flat vector, one after the other.

    Attributes:
        shapes: their static shapes.
        dtypes: their types.
        align: each begins at a multiple of this; zeros fill the gaps.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    align: int = 1

    @classmethod
    def of(cls, tensors: Sequence[Any], align: int = 1) -> Layout:
        """The layout of tensors, or of their specs."""
        shapes = tuple(tuple(tensor.shape.as_list()) for tensor in tensors)
        return cls(shapes, tuple(tf.as_dtype(tensor.dtype) for tensor in tensors), align)

    @property
    def dtype(self) -> DType:
        """The type to compute in: float64 if a tensor has it, otherwise float32."""
        return tf.float64 if tf.float64 in self.dtypes else tf.float32

    @property
    def sizes(self) -> list[int]:
        """The tensors' numbers of values."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def gaps(self) -> list[int]:
        """The numbers of zeros behind each tensor."""
        return [-size % self.align for size in self.sizes]

    @property
    def length(self) -> int:
        """The length of the vector."""
        return sum(self.sizes) + sum(self.gaps)

    def join(
        self, values: Sequence[Any], dtype: DType | None = None, length: int | None = None
    ) -> Tensor:
        """Makes one vector of tensors.

        Args:
            values: the tensors.
            dtype: the vector's type; `self.dtype` by default.
            length: its length, `self.length` by default; zeros fill it up.
        """
        dtype = dtype or self.dtype
        pieces: list[Any] = []
        for value, gap in zip(values, self.gaps, strict=True):
            pieces.append(tf.cast(tf.reshape(value, [-1]), dtype))
            if gap:
                pieces.append(tf.zeros([gap], dtype))
        if length is not None and length > self.length:
            pieces.append(tf.zeros([length - self.length], dtype))
        return tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0]

    def split(self, flat: Tensor, dtype: DType | None = None) -> list[Any]:
        """The tensors of a vector, which may have more at its end.

        Args:
            flat: the vector.
            dtype: the tensors' type; `self.dtypes` by default.
        """
        lengths = [each for pair in zip(self.sizes, self.gaps, strict=True) for each in pair]
        pieces = tf.split(flat, [*lengths, flat.shape[0] - self.length])[:-1:2]
        return [
            tf.cast(tf.reshape(piece, shape), dtype or own)
            for piece, shape, own in zip(pieces, self.shapes, self.dtypes, strict=True)
        ]


def parts_for(length: int, count: int, align: int = 1) -> int:
    """The length of each of `count` parts that hold `length` values: a multiple of `align`."""
    return -(-length // (count * align)) * align
