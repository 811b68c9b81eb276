"""Gathers tensors of any type by collectives that know some types only."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.types import Tensor

__all__ = ["gather_any", "gather_strings"]

#: Types whose bits TensorFlow's collectives gather as those of another type.
_CARRIED_AS = {
    tf.bfloat16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    tf.complex128: tf.float64,
}
#: Types that are gathered as a wider one, for want of a collective with elements of their size.
_WIDENED = (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16)

_Gather = Callable[[Tensor], Tensor]


def gather_any(gather: _Gather, tensor: Tensor) -> Tensor:
    """Gathers a tensor by a collective of `float16`, `float32`, `float64`, `int32` and `int64`.

    Args:
        gather: concatenates the processes' tensors along their first axis.
        tensor: a dense tensor of any type but `tf.variant` and `tf.resource`.
    """
    dtype = tensor.dtype
    if dtype == tf.string:
        return gather_strings(gather, tensor)
    if dtype in _WIDENED:
        return tf.cast(gather(tf.cast(tensor, tf.int32)), dtype)
    if dtype in _CARRIED_AS:
        return tf.bitcast(gather(tf.bitcast(tensor, _CARRIED_AS[dtype])), dtype)
    return gather(tensor)


def gather_strings(gather: _Gather, strings: Tensor) -> Tensor:
    """Gathers strings as their bytes, of as many columns as the longest has on any process.

    Args:
        gather: as for `gather_any`.
        strings: a dense tensor of strings.
    """
    lengths = tf.strings.length(strings)
    longest = tf.reduce_max(tf.concat([tf.reshape(lengths, [-1]), [1]], 0))
    columns = tf.reduce_max(gather(longest[None]))
    letters = tf.cast(tf.io.decode_raw(strings, tf.uint8, fixed_length=columns), tf.int32)
    alphabet = tf.constant([bytes([each]) for each in range(256)])
    joined = tf.strings.reduce_join(tf.gather(alphabet, gather(letters)), axis=-1)
    return tf.strings.substr(joined, tf.zeros(tf.shape(joined), tf.int32), gather(lengths))
