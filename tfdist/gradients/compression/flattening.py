"""Several tensors as one flat vector."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.types import DType, Tensor

__all__ = ["Layout", "parts_for"]


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
