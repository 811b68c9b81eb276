"""Some values of gradients only: the largest, or those at places drawn in each step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.comm.replica_collectives import Link
from tfdist.gradients.compression.base import (
    Compression,
    Layout,
    Memory,
    all_finite,
    error_memory,
    unless_broken,
)
from tfdist.types import Tensor

__all__ = ["RandomValues", "TopValues", "part_of", "poisoned"]

_SEED = 20180915


@dataclasses.dataclass(frozen=True)
class TopValues(Compression):
    """Of each tensor, each replica sends its values of largest magnitude and their positions.

    Values that are not sent are fed back (arXiv:1704.05021, arXiv:1809.07599). A sent value has 8
    bytes and goes to all replicas: it sends 8 (p - 1) `ratio` bytes a value, which is less than an
    all-reduce of float32 only if `ratio` is below 1/p.

    Attributes:
        ratio: the part of a tensor's values that is sent, at least one value.
    """

    ratio: float

    def memory(self, specs: Sequence[tf.TensorSpec]) -> list[Memory]:
        """See `Compression.memory`."""
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

    def _positions(self, layout: Layout, corrected: Tensor, finite: Tensor) -> Tensor:
        """The places of the largest values in the flat vector: int32."""
        # A NaN has no place in an order, on which top_k relies.
        ordered = tf.cond(finite, lambda: corrected, lambda: tf.zeros_like(corrected))
        pieces = layout.split(ordered, layout.dtype)
        result, start = [], 0
        for piece, size in zip(pieces, layout.sizes, strict=True):
            magnitudes = tf.abs(tf.reshape(piece, [-1]))
            kept = part_of(size, self.ratio)
            result.append(tf.math.top_k(magnitudes, kept, sorted=False).indices + start)
            start += size
        return tf.concat(result, 0)


def part_of(size: int, ratio: float) -> int:
    """The number of values that is a ratio of `size`, at least one if there is any."""
    return min(size, max(1, math.ceil(round(ratio * size, 6))))


def poisoned(sent: Tensor, finite: Tensor) -> Tensor:
    """The values that a replica sends, or NaNs in their place, so that all see that it has some.

    Args:
        sent: the values that it has chosen.
        finite: whether there is no NaN and no infinity among all its values.
    """
    return sent * tf.where(finite, tf.ones([], sent.dtype), tf.constant(float("nan"), sent.dtype))


@dataclasses.dataclass(frozen=True)
class RandomValues(Compression):
    """All replicas send the values at the same random positions of all tensors together.

    Values that are not sent are fed back (random-k of arXiv:1809.07599). Positions need not travel:
    it sends 8 (p - 1) / p `ratio` bytes a float32 value. The values lie in rows of about 1 /
    `ratio`; a step sends one of each row, with equal chances and independent of other rows. In a
    turn of as many steps every value is sent once, in an order that is drawn for each turn: none
    waits for two turns.

    Attributes:
        ratio: the part of all values that is sent in a step, at least one value.
    """

    ratio: float

    def memory(self, specs: Sequence[tf.TensorSpec]) -> list[Memory]:
        """See `Compression.memory`."""
        layout = Layout.of(specs)
        rows, steps = self._rows(layout.length)
        return [
            error_memory(rows * steps, layout.dtype),
            Memory("counter", (), tf.int64, True, lambda: tf.zeros([], tf.int64)),
        ]

    def __call__(
        self, link: Link, values: Sequence[Any], memory: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """See `Compression`."""
        layout = Layout.of(values)
        if not layout.length:
            return list(values), list(memory)
        rows, steps = self._rows(layout.length)
        error, counter = memory
        corrected = layout.join(values, length=rows * steps) + error
        corrected = tf.reshape(corrected, [rows, steps])
        columns = _drawn(counter, rows, steps)
        chosen = tf.gather(corrected, columns, batch_dims=1)
        (sums,) = link.sum([poisoned(chosen, all_finite(corrected))])
        # Masks cost as much for any ratio; scattering costs as much only up to a ratio of 0.01.
        mask = tf.one_hot(columns, steps, True, False, dtype=tf.bool)
        zero = tf.zeros([], layout.dtype)
        total = tf.reshape(tf.where(mask, sums[:, None], zero), [-1])
        left = tf.reshape(tf.where(mask, zero, corrected), [-1])
        kept = unless_broken(all_finite(sums), [left, counter + 1], memory)
        return layout.split(total), kept

    def _rows(self, length: int) -> tuple[int, int]:
        """The rows and their length, by which they have zeros at the end."""
        if not length:
            return 0, 0
        steps = -(-length // part_of(length, self.ratio))
        return -(-length // steps), steps


def _drawn(counter: Tensor, rows: int, steps: int) -> Tensor:
    """The column of each row in one step: int32 of shape `(rows,)`.

    In each of `steps` steps it is another one, moved by the same for all rows.
    """
    step, turn = tf.cast(counter % steps, tf.int32), tf.cast(counter // steps, tf.int32)
    seed = tf.stack([_SEED, turn])
    # A named algorithm, for it to be the same on all devices.
    first = tf.random.stateless_uniform([rows], seed, 0, steps, tf.int32, alg="philox")
    return (first + tf.random.experimental.index_shuffle(step, seed, steps - 1)) % steps
