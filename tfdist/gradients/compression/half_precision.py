"""Gradients in 16 bits, added up in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.comm.replica_collectives import Link
from tfdist.gradients.compression.base import Compression, Layout, parts_for, sum_plainly
from tfdist.types import DType, Tensor

__all__ = ["Bfloat16", "ScaledFloat16"]

#: The largest value to which a tensor's sum is scaled; float16 ends at 65504.
_LARGEST = 32768.0
_LARGEST_SCALE = 1e36


class Bfloat16(Compression):
    """Gradients travel as bfloat16, which has float32's range and 8 bits of precision.

    Each value is rounded before the addition and after it: the error is at most about 2^-8 of a
    sum's magnitudes. Gradients that are float16, which has 3 bits more, travel as float32.
    """

    def __call__(
        self, link: Link, values: Sequence[Any], memory: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """See `Compression`."""
        finer = [i for i, value in enumerate(values) if value.dtype == tf.float16]
        indices = [i for i in range(len(values)) if i not in finer]
        sums = dict(zip(finer, sum_plainly(link, [values[i] for i in finer]), strict=True))
        if indices:
            layout = Layout.of([values[i] for i in indices])
            total = _sum_halves(link, layout, [values[i] for i in indices], tf.bfloat16)
            sums.update(zip(indices, layout.split(total), strict=True))
        return [sums[i] for i in range(len(values))], list(memory)


class ScaledFloat16(Compression):
    """Gradients travel as float16, each tensor scaled such that its sum cannot overflow.

    With s the sum of the replicas' largest magnitudes in a tensor, its values travel times 32768/s:
    no sum is above s. The error is at most about 2^-10 of a sum's magnitudes, or (p + 1) s 2^-40
    if that is more, with p replicas. Scaling as in mixed precision training (arXiv:1710.03740),
    but by what is there instead of by trial. A tensor with a NaN or an infinity on some replica is
    NaN throughout.
    """

    def __call__(
        self, link: Link, values: Sequence[Any], memory: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """See `Compression`."""
        if not values:
            return [], list(memory)
        layout = Layout.of(values)
        values = [tf.cast(value, layout.dtype) for value in values]
        (bounds,) = link.sum([tf.stack([_largest(value) for value in values])])
        scales = tf.minimum(
            tf.math.divide_no_nan(tf.constant(_LARGEST, bounds.dtype), bounds), _LARGEST_SCALE
        )
        scales = tf.where(tf.math.is_finite(bounds), scales, float("nan"))
        scaled = [value * scale for value, scale in zip(values, tf.unstack(scales), strict=True)]
        total = layout.split(_sum_halves(link, layout, scaled, tf.float16), layout.dtype)
        # A scale of 0 has no reciprocal, and a NaN has: NaN.
        back = tf.unstack(tf.where(scales == 0, scales, 1 / scales))
        sums = [
            tf.cast(value * scale, dtype)
            for value, scale, dtype in zip(total, back, layout.dtypes, strict=True)
        ]
        return sums, list(memory)


def _largest(value: Tensor) -> Tensor:
    """A tensor's largest magnitude; NaN if it has a NaN."""
    return tf.reduce_max(tf.abs(value)) if value.shape.num_elements() else tf.zeros([], value.dtype)


def _sum_halves(link: Link, layout: Layout, values: Sequence[Any], dtype: DType) -> Tensor:
    """Each replica adds up a part of all values, in float32, and gives all others the sum.

    It sends as much as a ring all-reduce of 16 bits does, 4 (p - 1) / p bytes a value over p
    replicas.

    Returns:
        The sums as a vector of type `dtype`, at least `layout.length` long.
    """
    if not layout.length:
        return tf.zeros([0], dtype)
    part = parts_for(layout.length, link.count)
    flat = layout.join(values, dtype, part * link.count)
    received = link.all_to_all(tf.reshape(flat, [link.count, part]))
    own = tf.reduce_sum(tf.cast(received, tf.float32), 0)
    return link.gather(tf.cast(own, dtype))
