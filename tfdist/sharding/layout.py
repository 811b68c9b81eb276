"""The division of tensors over the processes of a job: arithmetic, without TensorFlow.

A layout names the dimension of a tensor that is divided. The words are those of
`keras.distribution`: the part of a tensor that one process holds is its shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

__all__ = ["Layout", "layout_for"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The division of a tensor along one dimension into equal shards, one for each process.

    Attributes:
        shape: the whole tensor's.
        dimension: the divided one; the number of shards divides its size.
        shards: how many there are.
        index: the number of this process's.
    """

    shape: tuple[int, ...]
    dimension: int
    shards: int
    index: int

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of each shard."""
        sizes = list(self.shape)
        sizes[self.dimension] //= self.shards
        return tuple(sizes)

    @property
    def start(self) -> int:
        """The first position, along the divided dimension, of this process's shard."""
        return self.index * self.shard_shape[self.dimension]

    @property
    def stop(self) -> int:
        """The position after the last one of this process's shard."""
        return self.start + self.shard_shape[self.dimension]

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The whole tensor as `(before, shards, after)` blocks.

        `before` counts the positions of the dimensions before the divided one; `after` the elements
        of a shard at one of them.
        """
        before = math.prod(self.shape[: self.dimension])
        return before, self.shards, math.prod(self.shape) // (before * self.shards)


def layout_for(shape: Sequence[int], shards: int, index: int) -> Layout | None:
    """The division of a tensor along its first dimension that allows equal shards.

    Args:
        shape: the whole tensor's.
        shards: how many there are to be.
        index: the number of this process's.

    Returns:
        The layout; None if no dimension can be divided, or there is one shard only.
    """
    for dimension, size in enumerate(shape):
        if shards > 1 and size and size % shards == 0:
            return Layout(tuple(shape), dimension, shards, index)
    return None
