"""Gradients as products of thin matrices: PowerSGD."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.comm.replica_collectives import Link
from tfdist.gradients.compression.base import (
    Compression,
    Layout,
    Memory,
    all_finite,
    error_memory,
    sum_plainly,
    unless_broken,
)
from tfdist.types import Tensor

__all__ = ["LowRank", "matrix_shape"]


@dataclasses.dataclass(frozen=True)
class LowRank(Compression):
    """A gradient M of n x m travels as P and Q of `rank` columns, and the sum is about P Q^T.

    One step of power iteration from the Q of the step before (PowerSGD, arXiv:1905.13727): P is the
    sum of M Q, then made orthonormal, and Q the sum of M^T P. The rest of a replica's M besides its
    part of P Q^T is fed back. A float32 tensor costs 8 (p - 1) / p `rank` (n + m) bytes. Those for
    which that is more than half of what they have, such as all vectors, travel as they are.

    That results are the same to the bit takes processors of one kind, as each replica makes P
    orthonormal by itself.

    Attributes:
        rank: the number of columns.
    """

    rank: int

    def memory(self, specs: Sequence[tf.TensorSpec]) -> list[Memory]:
        """See `Compression.memory`."""
        layout = Layout.of([spec for spec in specs if self._matrix(spec)])
        length = sum(columns * self.rank for _, columns in self._matrices(layout))

        def start() -> Tensor:
            return tf.constant(np.random.default_rng(0).standard_normal(length), layout.dtype)

        if not length:
            return []
        factor = Memory("factor", (length,), layout.dtype, True, start)
        return [error_memory(layout.length, layout.dtype), factor]

    def __call__(
        self, link: Link, values: Sequence[Any], memory: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """See `Compression`."""
        indices = [i for i, value in enumerate(values) if self._matrix(value)]
        others = [i for i in range(len(values)) if i not in indices]
        if not indices:
            return sum_plainly(link, values), list(memory)
        layout = Layout.of([values[i] for i in indices])
        matrices = self._corrected(layout, [values[i] for i in indices], memory[0])
        factors = self._factors(layout)

        starts = factors.split(memory[1], layout.dtype)
        sketches = [tf.matmul(matrix, q) for matrix, q in zip(matrices, starts, strict=True)]
        first = sum_plainly(link, [*sketches, *(values[i] for i in others)])
        bases = [tf.linalg.qr(sketch).q for sketch in first[: len(indices)]]
        own = [
            tf.matmul(matrix, base, transpose_a=True)
            for matrix, base in zip(matrices, bases, strict=True)
        ]
        second = link.sum(own)

        left = [m - product for m, product in zip(matrices, _products(bases, own), strict=True)]
        following = [layout.join(left), factors.join(second)]
        sums = dict(zip(others, first[len(indices) :], strict=True))
        for i, product in zip(indices, _products(bases, second), strict=True):
            sums[i] = tf.cast(tf.reshape(product, values[i].shape), values[i].dtype)
        finite = all_finite(*second, *(sums[i] for i in others))
        return [sums[i] for i in range(len(values))], unless_broken(finite, following, memory)

    def _matrix(self, tensor: Tensor | tf.TensorSpec) -> tuple[int, int] | None:
        return matrix_shape(tuple(tensor.shape.as_list()), self.rank)

    def _matrices(self, layout: Layout) -> list[tuple[int, int]]:
        result = [matrix_shape(shape, self.rank) for shape in layout.shapes]
        return [shape for shape in result if shape]

    def _factors(self, layout: Layout) -> Layout:
        shapes = tuple((columns, self.rank) for _, columns in self._matrices(layout))
        return Layout(shapes, (layout.dtype,) * len(shapes))

    def _corrected(self, layout: Layout, values: Sequence[Any], error: Tensor) -> list[Any]:
        return [
            tf.reshape(tf.cast(value, layout.dtype) + left, shape)
            for value, left, shape in zip(
                values, layout.split(error, layout.dtype), self._matrices(layout), strict=True
            )
        ]


def matrix_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """The matrix as which a tensor is compressed.

    Of the ways to put the first dimensions into rows and the others into columns it is the one of
    least rows and columns together, so the cheapest. A convolution's kernel usually becomes
    (height * width * channels in, channels out), and an attention's, of
    (width, heads, width of a head) or the other way around, its true matrix.

    Args:
        shape: the tensor's shape.
        rank: the rank of the product.

    Returns:
        Rows and columns; None if the product would not save half.
    """
    ways = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    best = min(ways, key=sum, default=None)
    if best is None or not 0 < 2 * rank * sum(best) <= best[0] * best[1]:
        return None
    return best


def _products(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    return [tf.matmul(p, q, transpose_b=True) for p, q in zip(left, right, strict=True)]
