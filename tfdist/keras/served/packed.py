"""The results of a step as one string of bytes: one transfer to the chief, whatever they are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["Packed"]


class Packed:
    """Tensors of known shapes, packed in a graph and unpacked on the chief.

    Args:
        tensors: what is packed, of static shapes and numeric types.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self._specs = [(tuple(t.shape.as_list()), t.dtype.as_numpy_dtype) for t in tensors]
        flat = [_bytes(tensor) for tensor in tensors]
        self.box = tf.concat(flat, 0) if flat else tf.zeros([0], tf.uint8)

    def unpack(self, box: Any) -> list[np.ndarray[Any, Any]]:
        """The tensors' values.

        Args:
            box: the value of `box`, a uint8 array.
        """
        data, values = np.asarray(box).tobytes(), []
        start = 0
        for shape, dtype in self._specs:
            kind = np.dtype(dtype)
            count = math.prod(shape)
            values.append(np.frombuffer(data, kind, count, start).reshape(shape))
            start += count * kind.itemsize
        return values


def _bytes(tensor: Any) -> Any:
    if tensor.dtype == tf.bool:
        return tf.reshape(tf.cast(tensor, tf.uint8), [-1])
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])
