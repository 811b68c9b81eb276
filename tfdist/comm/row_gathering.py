"""Gathers rows of which each replica has a share of a known size, by one collective."""

from __future__ import annotations

import tensorflow as tf

from tfdist._tf.collectives import gather_alike
from tfdist.types import Strategy, Tensor

__all__ = ["gather_rows"]


def gather_rows(strategy: Strategy, tensor: Tensor, at_most: Tensor | None) -> Tensor:
    """Concatenates the replicas' tensors along their first axis, in the order of the replicas.

    TensorFlow exchanges the shapes first. Here each replica sends `at_most` rows, padded, with its
    own number of rows ahead of them. If one has more rows than expected, all see that, and
    exchange once more.

    Must be called in a replica context.

    Args:
        strategy: the strategy whose replicas call this, one in each process.
        tensor: of shape `(rows, ...)`; `rows` may differ between replicas.
        at_most: the number of rows that no replica is expected to exceed, the same on each
            replica; None if that is not known.
    """
    gather = tf.distribute.get_replica_context().all_gather
    shape = tensor.shape
    carried = shape.rank and shape[1:].is_fully_defined() and tensor.dtype in _AS_NUMBERS
    if at_most is None or not carried or tf.executing_eagerly():
        return gather(tensor, axis=0)
    at_most, own = tf.cast(at_most, tf.int32), tf.shape(tensor)[0]
    flat = tf.reshape(tensor, [own, shape[1:].num_elements()])
    head = _as_numbers(own, tensor.dtype)
    sent = tf.concat([head, tf.reshape(_padded(flat, at_most), [-1])], 0)
    received = tf.reshape(gather_alike(strategy, sent), [strategy.num_replicas_in_sync, -1])
    counts = _as_counts(received[:, : head.shape[0]])
    most = tf.reduce_max(counts)

    def once_more() -> Tensor:
        return tf.reshape(gather_alike(strategy, _padded(flat, most)), [-1, *shape[1:]])

    rows = tf.cond(
        most <= at_most,
        lambda: tf.reshape(received[:, head.shape[0] :], [-1, *shape[1:]]),
        once_more,
    )
    is_row = tf.sequence_mask(counts, tf.maximum(most, at_most))
    return tf.boolean_mask(rows, tf.reshape(is_row, [-1]))


def _padded(rows: Tensor, count: Tensor) -> Tensor:
    """The first rows of a matrix, at most `count`, and zeros up to that number of rows."""
    return tf.pad(rows[:count], [[0, tf.maximum(count - tf.shape(rows)[0], 0)], [0, 0]])


#: The types whose bits can hold a number of rows, each with the integers of the same bits.
_AS_NUMBERS = {
    tf.float16: tf.int32,
    tf.bfloat16: tf.int32,
    tf.float32: tf.int32,
    tf.int32: tf.int32,
    tf.float64: tf.int64,
    tf.int64: tf.int64,
}


def _as_numbers(count: Tensor, dtype: tf.DType) -> Tensor:
    """A number in the bits of a vector of some type."""
    number = tf.cast(count, _AS_NUMBERS[dtype])
    return tf.reshape(number if dtype.is_integer else tf.bitcast(number, dtype), [-1])


def _as_counts(heads: Tensor) -> Tensor:
    """The numbers in the bits of each row of a matrix."""
    dtype, integers = heads.dtype, _AS_NUMBERS[heads.dtype]
    if not dtype.is_integer:
        heads = tf.bitcast(heads if dtype.size == 2 else heads[:, 0], integers)
    return tf.cast(tf.reshape(heads, [-1]), tf.int32)
