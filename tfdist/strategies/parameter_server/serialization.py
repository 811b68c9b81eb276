"""Many tensors as one: every tensor that goes to another task by itself is a call of its own.

The chief hands a function on a worker one box of bytes, with the batch and the numbers of its step.
A step returns one vector of numbers. Between workers and servers small tensors share transfers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.types import Array, DType, Tensor

__all__ = ["BOX", "PACKED_BYTES", "Header", "Layout", "Vector", "joined", "move", "parted", "unbox"]

#: Numbers at the front of each box: those of `Header`.
FIELDS = 6

BOX = tf.TensorSpec([None], tf.uint8)


class Header:
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
    """The layout of the tensors of a kind of batch in a box, each after its dimensions.

    Args:
        kinds: tensors or their specs, of numeric types. The first dimension may differ from box to
            box, and those that are None.
    """

    def __init__(self, kinds: Sequence[Any]) -> None:
        self._kinds = [(each.dtype, list(each.shape)) for each in kinds]

    def box(self, numbers: list[int], tensors: list[Any]) -> np.ndarray[Any, Any]:
        """A box with the fields of `Header`, and arrays of the layout's kinds."""
        arrays = [np.ascontiguousarray(t) for t in tensors]
        shapes = [np.shape(tensor) for tensor in tensors]
        head = np.array([*numbers, *(size for shape in shapes for size in shape)], np.int64)
        parts = [head, *arrays]
        return np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])

    def open(self, box: Tensor) -> list[Any]:
        """The tensors of a box, in a graph."""
        heads = FIELDS + sum(len(shape) for _, shape in self._kinds)
        numbers, offset = _numbers(box, heads), FIELDS
        start, tensors = tf.constant(8 * heads, tf.int64), []
        for dtype, shape in self._kinds:
            sizes = numbers[offset : offset + len(shape)]
            offset += len(shape)
            bytes_each = 1 if dtype == tf.bool else dtype.size
            end = start + tf.reduce_prod(sizes) * bytes_each
            tensor = _tensor(box[start:end], dtype, _sizes_of(shape, sizes))
            tensors.append(tf.ensure_shape(tensor, [None, *shape[1:]] if shape else []))
            start = end
        return tensors


def _sizes_of(shape: list[int | None], sizes: Tensor) -> Any:
    """The shape for a reshape: static if only the first dimension is open."""
    if None in shape[1:]:
        return sizes
    return [-1, *shape[1:]] if shape else []


def unbox(box: Tensor) -> Header:
    """The numbers at the front of a box, in a graph."""
    return Header(_numbers(box, FIELDS))


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


def _tensor(data: Tensor, dtype: DType, shape: Any) -> Tensor:
    if dtype == tf.bool:
        return tf.reshape(tf.cast(data, tf.bool), shape)
    if dtype.size > 1:
        data = tf.reshape(data, [-1, dtype.size])
    return tf.reshape(tf.bitcast(data, dtype), shape)


class Vector:
    """The layout of numbers of known shapes, one after the other."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._sizes = [math.prod(shape) for shape in shapes]
        self.size = sum(self._sizes)

    def pack(self, numbers: Sequence[Any], dtype: DType) -> Tensor:
        """The numbers as one tensor of a type, in a graph."""
        flat = [tf.reshape(tf.cast(number, dtype), [-1]) for number in numbers]
        return tf.concat(flat, 0) if flat else tf.zeros([0], dtype)

    def unpack(self, packed: Array) -> list[Array]:
        """The numbers of a packed tensor's value."""
        parts = np.split(packed, np.cumsum(self._sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]


#: Tensors of up to this size share a transfer. A copy of bigger ones would cost more than the call.
PACKED_BYTES = 256 << 10


def move(
    tensors: Sequence[Any],
    sources: Sequence[str | None],
    targets: Sequence[str | None],
    wire: DType | None = None,
) -> list[Any]:
    """Copies of tensors on other devices.

    Args:
        tensors: of any shapes; only those of a static shape share transfers.
        sources: for each the device that it is on, or None for the device of the caller.
        targets: for each the device that it goes to, or None for the device of the caller.
        wire: type in which float32 and float64 travel; None leaves them as they are.

    Returns:
        The copies, in order, each of its tensor's type.
    """
    routes: dict[Any, list[int]] = {}
    moved: dict[int, Any] = {}
    for i, (tensor, source, target) in enumerate(zip(tensors, sources, targets, strict=True)):
        alone = None if _is_small(tensor) else i
        routes.setdefault((source, target, tensor.dtype, alone), []).append(i)
    for (source, target, _, _), indices in routes.items():
        together = _move_packed([tensors[i] for i in indices], source, target, wire)
        moved.update(zip(indices, together, strict=True))
    return [moved[i] for i in range(len(tensors))]


def _is_small(tensor: Tensor) -> bool:
    if not tensor.shape.is_fully_defined() or tensor.dtype == tf.string:
        return False
    return bool((tensor.shape.num_elements() or 0) * tensor.dtype.size <= PACKED_BYTES)


def _move_packed(
    tensors: list[Any], source: str | None, target: str | None, wire: DType | None
) -> list[Any]:
    shapes, dtype = [tensor.shape for tensor in tensors], tensors[0].dtype
    kind = wire if wire is not None and dtype in (tf.float32, tf.float64) else dtype
    with tf.device(source):
        together = tensors[0]
        if len(tensors) > 1:
            together = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
        sent = tf.cast(together, kind)
    with tf.device(target):
        arrived = tf.identity(sent) if kind == dtype else tf.cast(sent, dtype)
        if len(tensors) == 1:
            return [arrived]
        parts = tf.split(arrived, [math.prod(shape) for shape in shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
