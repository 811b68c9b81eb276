"""Gradients in 8 bits, in blocks with a scale each."""

from __future__ import annotations

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
    parts_for,
    unless_broken,
)
from tfdist.types import DType, Tensor

__all__ = ["BLOCK", "EightBit", "decoded", "encoded"]

#: Values that share a scale.
BLOCK = 256
_WORDS = BLOCK // 4
_LARGEST = 127


class EightBit(Compression):
    """Gradients travel as whole numbers of 8 bits, in blocks of 256 with a float32 scale each.

    Each replica adds up a part of all values, in float32, and gives the others the sum, in 8 bits
    again. Both roundings are fed back, as the errors of worker and server in 1-bit Adam
    (arXiv:2102.02888): since only the replicas' errors together matter, a replica adds that of the
    part whose sum it makes to its own. Blocks with scales of their own are from 8-bit
    approximations (arXiv:1511.04561) and 8-bit optimizers (arXiv:2110.02861); a block never spans
    two tensors. Over p replicas it sends 2 (p - 1) / p bytes a value, and 1/64 more for the scales.
    """

    def memory(self, specs: Sequence[tf.TensorSpec]) -> list[Memory]:
        """See `Compression.memory`."""
        layout = Layout.of(specs, BLOCK)
        return [error_memory(layout.length, layout.dtype)]

    def __call__(
        self, link: Link, values: Sequence[Any], memory: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """See `Compression`."""
        layout = Layout.of(values, BLOCK)
        if not layout.length:
            return list(values), list(memory)
        part = parts_for(layout.length, link.count, BLOCK)
        rest = part * link.count - layout.length
        errors = tf.pad(memory[0], [[0, rest]]) if rest else memory[0]
        corrected = layout.join(values, length=part * link.count) + errors
        corrected = tf.reshape(corrected, [link.count, part // BLOCK, BLOCK])

        sent = encoded(corrected)
        received = link.all_to_all(tf.reshape(sent, [link.count, -1]))
        received = tf.reshape(received, [link.count, part // BLOCK, _WORDS + 1])
        own = tf.reduce_sum(decoded(received, layout.dtype), 0)
        own_sent = encoded(own)
        gathered = link.gather(own_sent)
        total = tf.reshape(decoded(gathered, layout.dtype), [-1])

        left = corrected - decoded(sent, layout.dtype)
        left_of_own = own - decoded(own_sent, layout.dtype)
        left = tf.tensor_scatter_nd_add(left, [[link.index]], left_of_own[None])
        left = tf.reshape(left, [-1])[: layout.length]
        kept = unless_broken(all_finite(_scales(gathered)), [left], memory)
        return layout.split(total), kept


def encoded(blocks: Tensor) -> Tensor:
    """Rounds blocks to 8 bits.

    The error of a value is at most 1/254 of the largest magnitude in its block. A block with a NaN
    or an infinity is NaN throughout when it is decoded.

    Args:
        blocks: floating values of shape `(..., 256)`.

    Returns:
        int32 of shape `(..., 65)`: four values a word, and the bits of the float32 scale.
    """
    largest = tf.maximum(
        tf.reduce_max(blocks, -1, keepdims=True), -tf.reduce_min(blocks, -1, keepdims=True)
    )
    scale = tf.cast(largest / _LARGEST, tf.float32)
    unit = tf.ones([], blocks.dtype)
    rounded = tf.round(blocks * tf.math.divide_no_nan(unit, tf.cast(scale, blocks.dtype)))
    words = tf.bitcast(
        tf.reshape(tf.cast(rounded, tf.int8), [*blocks.shape[:-1], _WORDS, 4]), tf.int32
    )
    return tf.concat([words, tf.bitcast(scale, tf.int32)], -1)


def decoded(words: Tensor, dtype: DType) -> Tensor:
    """The values of blocks that `encoded` made.

    Args:
        words: int32 of shape `(..., 65)`.
        dtype: the values' type.

    Returns:
        Values of shape `(..., 256)`.
    """
    whole = tf.reshape(tf.bitcast(words[..., :_WORDS], tf.int8), [*words.shape[:-1], BLOCK])
    return tf.cast(whole, dtype) * tf.cast(_scales(words), dtype)


def _scales(words: Tensor) -> Tensor:
    return tf.bitcast(words[..., _WORDS:], tf.float32)
