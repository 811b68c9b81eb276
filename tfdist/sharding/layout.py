"""The division of tensors over the processes of a job: arithmetic, without TensorFlow.

A layout names the dimensions of a tensor that are divided, and the axes of the mesh over which they
are. The words are those of `keras.distribution`: the part of a tensor that one process holds is its
shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdist.config.mesh import Axis

__all__ = ["Cut", "Layout", "cut_for"]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The division of a tensor along one dimension into equal parts, one for each process.

    Attributes:
        shape: the undivided tensor's.
        dimension: the divided one; the number of shards divides its size.
        axis: the axis of the mesh over which it is divided, as this process sees it.
    """

    shape: tuple[int, ...]
    dimension: int
    axis: Axis

    @property
    def shards(self) -> int:
        """The number of shards."""
        return self.axis.size

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of each shard."""
        sizes = list(self.shape)
        sizes[self.dimension] //= self.shards
        return tuple(sizes)

    @property
    def start(self) -> int:
        """The first position, along the divided dimension, of this process's shard."""
        return self.axis.index * self.shard_shape[self.dimension]

    @property
    def stop(self) -> int:
        """The position after the last one of this process's shard."""
        return self.start + self.shard_shape[self.dimension]

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The undivided tensor as `(before, shards, after)` blocks.

        `before` counts the positions of the dimensions before the divided one; `after` the elements
        of a shard at one of them.
        """
        before = math.prod(self.shape[: self.dimension])
        return before, self.shards, math.prod(self.shape) // (before * self.shards)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The division of a tensor over the axes of a mesh.

    Attributes:
        cuts: at least one; each divides what the one before it leaves to this process.
    """

    cuts: tuple[Cut, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        return self.cuts[0].shape

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of this process's shard."""
        return self.cuts[-1].shard_shape

    def along(self, axis: str) -> Cut | None:
        """The cut over an axis; None if the tensor is not divided over it."""
        return next((cut for cut in self.cuts if cut.axis.name == axis), None)


def cut_for(shape: Sequence[int], axis: Axis) -> Cut | None:
    """The division of a tensor along its first dimension that allows equal shards.

    Args:
        shape: the tensor's.
        axis: the axis of the mesh over which it is to be divided.

    Returns:
        The cut; None if no dimension can be divided, or the axis has one process only.
    """
    for dimension, size in enumerate(shape):
        if axis.size > 1 and size and size % axis.size == 0:
            return Cut(tuple(shape), dimension, axis)
    return None
