"""Variables that are split over several servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.distribute import ShardedVariable
from tfdist.comm.replica_collectives import is_sparse
from tfdist.types import Array, Gradient, IndexedSlices

__all__ = ["Partitioned", "part_of", "showing_part", "shown_part"]

_local = threading.local()


class Partitioned(ShardedVariable):  # type: ignore[misc]
    """A variable whose rows are on several servers.

    Args:
        parts: one variable for each range of rows, in order.
        ranges: first and last + 1 row of each part.
        name: the whole variable's name.
    """

    def __init__(self, parts: list[Any], ranges: list[tuple[int, int]], name: str) -> None:
        super().__init__(parts, name)
        self.ranges = ranges
        for number, part in enumerate(parts):
            part._tfdist_part = (self, number)
            part._distributed_container = lambda: self

    @property
    def device(self) -> str:
        """The device of the first part, where small companions of the variable go."""
        return str(self.variables[0].device)

    @property
    def trainable(self) -> bool:
        """Whether the parts are trainable."""
        return bool(self.variables[0].trainable)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype=dtype)

    def join(self, grads: list[Any]) -> Gradient | None:
        """The gradient of the whole variable from those of its parts; None if there is none."""
        if all(grad is None for grad in grads):
            return None
        dense = [
            tf.zeros_like(part) if grad is None else tf.convert_to_tensor(grad)
            for grad, part in zip(grads, self.variables, strict=True)
        ]
        return tf.concat(dense, 0)

    def split(self, value: Gradient) -> list[Any]:
        """The rows of a tensor that belong to each part.

        Args:
            value: a tensor, or `IndexedSlices`, of the whole variable's shape.
        """
        if not is_sparse(value):
            return list(tf.split(value, [end - start for start, end in self.ranges]))
        return [self._rows(value, start, end) for start, end in self.ranges]

    def _rows(self, value: IndexedSlices, start: int, end: int) -> IndexedSlices:
        inside = tf.logical_and(value.indices >= start, value.indices < end)
        indices = tf.boolean_mask(value.indices, inside) - tf.cast(start, value.indices.dtype)
        shape = [end - start, *self.shape[1:]]
        return tf.IndexedSlices(tf.boolean_mask(value.values, inside), indices, tf.constant(shape))


def part_of(variable: object) -> tuple[Partitioned, int] | None:
    """Of which variable, and which part of it, a variable is; None for a whole one."""
    part: tuple[Partitioned, int] | None = getattr(variable, "_tfdist_part", None)
    return part


def shown_part() -> int | None:
    """The part that partitioned variables show on this thread; None means the whole."""
    part: int | None = getattr(_local, "part", None)
    return part


@contextmanager
def showing_part(part: int) -> Iterator[None]:
    """Lets partitioned variables show one of their parts, for optimizers that update it."""
    before = shown_part()
    _local.part = part
    try:
        yield
    finally:
        _local.part = before
