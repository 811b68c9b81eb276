"""Moving tensors between tasks in few transfers.

A transfer costs a call over the network, whatever its size. Small tensors that go the same way are
therefore put into one; big ones go alone, since a copy would cost more than the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.types import DType, Tensor

__all__ = ["PACKED_BYTES", "move"]

#: Tensors of up to this size share a transfer.
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
    routes: dict[tuple[str | None, str | None, Any], list[int]] = {}
    moved: dict[int, Any] = {}
    for i, (tensor, source, target) in enumerate(zip(tensors, sources, targets, strict=True)):
        if _is_small(tensor):
            routes.setdefault((source, target, tensor.dtype), []).append(i)
        else:
            moved[i] = _move_one(tensor, source, target, wire)
    for (source, target, _), places in routes.items():
        together = _move_packed([tensors[i] for i in places], source, target, wire)
        moved.update(zip(places, together, strict=True))
    return [moved[i] for i in range(len(tensors))]


def _is_small(tensor: Tensor) -> bool:
    if not tensor.shape.is_fully_defined() or tensor.dtype == tf.string:
        return False
    return bool((tensor.shape.num_elements() or 0) * tensor.dtype.size <= PACKED_BYTES)


def _wire_type(dtype: DType, wire: DType | None) -> DType:
    return wire if wire is not None and dtype in (tf.float32, tf.float64) else dtype


def _move_one(tensor: Tensor, source: str | None, target: str | None, wire: DType | None) -> Tensor:
    kind = _wire_type(tensor.dtype, wire)
    with tf.device(source):
        sent = tf.cast(tensor, kind)
    with tf.device(target):
        return tf.identity(sent) if kind == tensor.dtype else tf.cast(sent, tensor.dtype)


def _move_packed(
    tensors: list[Any], source: str | None, target: str | None, wire: DType | None
) -> list[Any]:
    if len(tensors) == 1:
        return [_move_one(tensors[0], source, target, wire)]
    shapes = [tensor.shape for tensor in tensors]
    with tf.device(source):
        box = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    box = _move_one(box, source, target, wire)
    with tf.device(target):
        parts = tf.split(box, [math.prod(shape) for shape in shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
