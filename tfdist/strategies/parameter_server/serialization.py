"""Batches as strings of bytes.

Every tensor that the chief hands to a function on a worker is a call of its own. A batch and the
numbers of its step therefore travel as one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.types import Array, DType, Tensor

__all__ = ["Layout", "Packed", "Told", "joined", "parted", "unbox"]

#: Numbers at the front of each box: those of `Told`.
FIELDS = 6

BOX = tf.TensorSpec([None], tf.uint8)


class Told:
    """The numbers that a step is given by the chief.

    Args:
        numbers: int64 vector: the step's number, how many updates there were, which part of the
            global batch this is, how many examples it has, how many the global batch has, and how
            many batches are passed over first.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.job, self.update, self.part, self.count, self.total, self.skip = (
            numbers[index] for index in range(FIELDS)
        )


class Layout:
    """The layout of the tensors of a kind of batch in a box.

    Args:
        tensors: an example, of numeric types; first dimensions may differ from box to box.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self._kinds = [(t.dtype, list(t.shape)) for t in tensors]

    def box(self, told: list[int], tensors: list[Any]) -> np.ndarray[Any, Any]:
        """A box.

        Args:
            told: the fields of `Told`.
            tensors: arrays of the layout's kinds.
        """
        arrays = [np.ascontiguousarray(t) for t in tensors]
        firsts = [array.shape[0] if array.ndim else 1 for array in arrays]
        head = np.array([*told, *firsts], np.int64)
        parts = [head, *arrays]
        return np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])

    def open(self, box: Tensor) -> list[Any]:
        """The tensors of a box, in a graph."""
        heads = FIELDS + len(self._kinds)
        numbers = _numbers(box, heads)
        start, tensors = tf.constant(8 * heads, tf.int64), []
        for index, (dtype, shape) in enumerate(self._kinds):
            rest = shape[1:]
            bytes_each = math.prod(rest) * (1 if dtype == tf.bool else dtype.size)
            end = start + numbers[FIELDS + index] * bytes_each
            tensors.append(_tensor(box[start:end], dtype, [-1, *rest] if shape else []))
            start = end
        return tensors


def unbox(box: Tensor) -> Told:
    """The numbers at the front of a box, in a graph."""
    return Told(_numbers(box, FIELDS))


def joined(boxes: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Several boxes as one."""
    lengths = np.array([len(box) for box in boxes], np.int64).view(np.uint8)
    return np.concatenate([lengths, *boxes])


def parted(box: Tensor, count: int) -> list[Any]:
    """The boxes of which one was joined, in a graph."""
    lengths, start, boxes = _numbers(box, count), tf.constant(8 * count, tf.int64), []
    for index in range(count):
        boxes.append(box[start : start + lengths[index]])
        start += lengths[index]
    return boxes


def _numbers(box: Tensor, count: int) -> Tensor:
    return tf.bitcast(tf.reshape(box[: 8 * count], [count, 8]), tf.int64)


def _tensor(data: Tensor, dtype: DType, shape: list[int]) -> Tensor:
    if dtype == tf.bool:
        return tf.reshape(tf.cast(data, tf.bool), shape)
    if dtype.size > 1:
        data = tf.reshape(data, [-1, dtype.size])
    return tf.reshape(tf.bitcast(data, dtype), shape)


# The results of a step as one string of bytes: one transfer to the chief, whatever they are.


class Packed:
    """Tensors of known shapes, packed in a graph and unpacked on the chief.

    Args:
        tensors: the tensors to pack, of static shapes and numeric types.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self._specs = [(tuple(t.shape.as_list()), t.dtype.as_numpy_dtype) for t in tensors]
        flat = [_bytes(tensor) for tensor in tensors]
        self.box = tf.concat(flat, 0) if flat else tf.zeros([0], tf.uint8)

    def unpack(self, box: Array) -> list[np.ndarray[Any, Any]]:
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


def _bytes(tensor: Tensor) -> Tensor:
    if tensor.dtype == tf.bool:
        return tf.reshape(tf.cast(tensor, tf.uint8), [-1])
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])
