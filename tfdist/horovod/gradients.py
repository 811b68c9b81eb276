"""How gradients are exchanged on Horovod: in groups, compressed, or by Adasum."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.horovod import adasum
from tfdist.horovod.collectives import Ring
from tfdist.keras.exchange import sum_over_replicas

__all__ = ["GradientSum"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientSum:
    """Sums gradients over the processes.

    Attributes:
        compression: in what dense gradients travel, a key of `horovod_options.COMPRESSIONS`.
        reduction: a key of `horovod_options.REDUCTIONS`.
        groups: the number of groups of dense gradients; each goes as soon as it is complete.
    """

    compression: str = "none"
    reduction: str = "mean"
    groups: int = 1

    def __call__(self, ring: Ring, values: Sequence[Any]) -> list[Any]:
        """The sums, on each process.

        Args:
            ring: the processes.
            values: for each weight a dense tensor or `IndexedSlices`, which stay sparse unless they
                go by Adasum.
        """
        if self.reduction == "adasum":
            dense = [tf.convert_to_tensor(value) * ring.size for value in values]
            return adasum.combine(ring, dense)
        sparse = [i for i, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
        dense_places = [i for i in range(len(values)) if i not in sparse]
        # The last layers' gradients are there first.
        dense_places.reverse()
        sums = dict(zip(sparse, sum_over_replicas([values[i] for i in sparse]), strict=True))
        dense = [values[i] for i in dense_places]
        sums.update(zip(dense_places, self._sum_dense(ring, dense), strict=True))
        return [sums[i] for i in range(len(values))]

    def _sum_dense(self, ring: Ring, values: list[Any]) -> list[Any]:
        if self.compression == "none" or not values:
            return ring.sum(values, self.groups) if values else []
        small = [i for i, value in enumerate(values) if value.dtype not in (tf.float32, tf.float64)]
        large = [i for i in range(len(values)) if i not in small]
        compressed = _sum_in_half if self.compression == "fp16" else _sum_in_bfloat16
        sums = dict(
            zip(large, compressed(ring, [values[i] for i in large], self.groups), strict=True)
        )
        sums.update(zip(small, ring.sum([values[i] for i in small]) if small else [], strict=True))
        return [sums[i] for i in range(len(values))]


def _sum_in_half(ring: Ring, values: list[Any], groups: int) -> list[Any]:
    if not values:
        return []
    sums = ring.sum([tf.cast(value, tf.float16) for value in values], groups)
    return [tf.cast(total, value.dtype) for total, value in zip(sums, values, strict=True)]


def _sum_in_bfloat16(ring: Ring, values: list[Any], groups: int) -> list[Any]:
    """Each process adds up a part of all gradients, in float32, and gives all others the sum.

    Horovod cannot add bfloat16; a reduce-scatter and an all-gather made of its other operations
    send as much as a ring all-reduce of 16 bits does, 2 (p - 1) / p values a process.
    """
    del groups
    if not values:
        return []
    flat = tf.concat([tf.cast(tf.reshape(value, [-1]), tf.bfloat16) for value in values], 0)
    length = tf.size(flat)
    part = -(-length // ring.size)
    padded = tf.pad(flat, [[0, part * ring.size - length]])
    received = ring.all_to_all(padded, tf.fill([ring.size], part))
    own = tf.reduce_sum(tf.cast(tf.reshape(received, [ring.size, part]), tf.float32), 0)
    total = ring.gather(tf.cast(own, tf.bfloat16))[:length]
    pieces = tf.split(total, [tf.size(value) for value in values])
    return [
        tf.cast(tf.reshape(piece, tf.shape(value)), value.dtype)
        for piece, value in zip(pieces, values, strict=True)
    ]
