"""The largest values of gradients only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.updates.compression.base import Memory, all_finite, error_memory, unless_broken
from tfdist.updates.compression.layout import Layout

if TYPE_CHECKING:
    from tfdist.updates.link import Link

__all__ = ["TopValues", "part_of", "poisoned"]


@dataclasses.dataclass(frozen=True)
class TopValues:
    """Of each tensor, each replica sends its values of largest magnitude and their positions.

    What is not sent is fed back (arXiv:1704.05021, arXiv:1809.07599). A sent value has 8 bytes and
    goes to all replicas: it sends 8 (p - 1) `ratio` bytes a value, which is less than an all-reduce
    of float32 only where `ratio` is below 1/p.

    Attributes:
        ratio: the part of a tensor's values that is sent, at least one value.
    """

    ratio: float

    def memory(self, specs: Sequence[tf.TensorSpec], replicas: int) -> list[Memory]:
        """See `Compression.memory`."""
        del replicas
        layout = Layout.of(specs)
        return [error_memory(layout.length, layout.dtype)]

    def __call__(
        self, link: Link, values: Sequence[Any], memory: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """See `Compression`."""
        layout = Layout.of(values)
        if not layout.length:
            return list(values), list(memory)
        corrected = layout.join(values) + memory[0]
        finite = all_finite(corrected)
        positions = self._positions(layout, corrected, finite)
        chosen = tf.gather(corrected, positions)
        sent = tf.cast(chosen, tf.float32)
        left = tf.tensor_scatter_nd_update(
            corrected, positions[:, None], chosen - tf.cast(sent, layout.dtype)
        )

        packed = tf.stack([positions, tf.bitcast(poisoned(sent, finite), tf.int32)])
        gathered = link.gather(packed[None])
        received = tf.bitcast(gathered[:, 1], tf.float32)
        total = tf.zeros([layout.length], layout.dtype)
        # One replica after the other: no position twice, so the order of additions is the same
        # everywhere.
        for i in range(link.count):
            total = tf.tensor_scatter_nd_add(
                total, gathered[i, 0][:, None], tf.cast(received[i], layout.dtype)
            )
        return layout.split(total), unless_broken(all_finite(received), [left], memory)

    def _positions(self, layout: Layout, corrected: Any, finite: Any) -> Any:
        """Where the largest values lie in the flat vector: int32."""

        def unchanged() -> Any:
            return corrected

        def zeros() -> Any:
            return tf.zeros_like(corrected)

        # A NaN has no place in an order, on which top_k relies.
        pieces = layout.split(tf.cond(finite, unchanged, zeros), layout.dtype)
        found, start = [], 0
        for piece, size in zip(pieces, layout.sizes, strict=True):
            magnitudes = tf.abs(tf.reshape(piece, [-1]))
            kept = part_of(size, self.ratio)
            found.append(tf.math.top_k(magnitudes, kept, sorted=False).indices + start)
            start += size
        return tf.concat(found, 0)


def part_of(size: int, ratio: float) -> int:
    """How many of `size` values a ratio means, at least one if there is any."""
    return min(size, max(1, math.ceil(round(ratio * size, 6))))


def poisoned(sent: Any, finite: Any) -> Any:
    """What a replica sends, or NaNs in its place, so that all see that it has some.

    Args:
        sent: the values that it has chosen.
        finite: whether there is no NaN and no infinity among all its values.
    """
    return sent * tf.where(finite, tf.ones([], sent.dtype), tf.constant(float("nan"), sent.dtype))
