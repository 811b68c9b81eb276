"""The division of tensors over the processes of a job: arithmetic, without TensorFlow.

A layout names the dimensions of a tensor that are divided, and the axes of the mesh over which they
are. The words are those of `keras.distribution`: the part of a tensor that one process holds is its
shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdist.config.mesh import Axis, Mesh

__all__ = ["Cut", "Layout", "Owned", "Region", "cut_for", "owners", "writers"]


@dataclasses.dataclass(frozen=True)
class Region:
    """A box of a tensor's elements.

    Attributes:
        start: for each dimension its first position.
        shape: for each dimension the number of positions.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """For each dimension the position after the last one."""
        return tuple(map(sum, zip(self.start, self.shape, strict=True)))

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: Region) -> Region | None:
        """The elements that two regions of a tensor have in common; None if there are none."""
        start = tuple(map(max, zip(self.start, other.start, strict=True)))
        stop = map(min, zip(self.stop, other.stop, strict=True))
        shape = tuple(last - first for first, last in zip(start, stop, strict=True))
        return Region(start, shape) if all(size > 0 for size in shape) else None

    def within(self, other: Region) -> tuple[slice, ...]:
        """The place of this region in an array of another one, which contains it."""
        firsts = [own - first for own, first in zip(self.start, other.start, strict=True)]
        return tuple(slice(at, at + size) for at, size in zip(firsts, self.shape, strict=True))


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

    def __str__(self) -> str:
        """The axis."""
        return self.axis.name


@dataclasses.dataclass(frozen=True)
class Owned(Cut):
    """A tensor that one process along an axis has whole; the shards of the others are empty.

    Attributes:
        owner: the index of that process. The divided dimension is the first.
    """

    owner: int

    @classmethod
    def of(cls, shape: Sequence[int], axis: Axis, owner: int) -> Owned:
        """A tensor of one dimension or more at its owner."""
        return cls(tuple(shape), 0, axis, owner)

    @property
    def size(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def is_here(self) -> bool:
        """Whether this process is the owner."""
        return self.axis.index == self.owner

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The whole shape at the owner, and nothing along any dimension elsewhere.

        Of a shape such as (0, 8) Keras's `add` takes the eight for a bias's.
        """
        return self.shape if self.is_here else (0,) * len(self.shape)

    @property
    def start(self) -> int:
        """The first position of what this process has."""
        return 0

    def __str__(self) -> str:
        """The axis, and the owner along it."""
        return f"{self.axis.name}[{self.owner}]"


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

    @property
    def region(self) -> Region:
        """The elements of the whole tensor that this process's shard has."""
        start = [0] * len(self.shape)
        for cut in self.cuts:
            start[cut.dimension] += cut.start
        return Region(tuple(start), self.shard_shape)

    def at(self, mesh: Mesh, rank: int) -> Layout:
        """The same division, as the process of a rank sees it."""
        axes = [mesh.axis(cut.axis.name, rank) for cut in self.cuts]
        pairs = zip(self.cuts, axes, strict=True)
        return Layout(tuple(dataclasses.replace(cut, axis=axis) for cut, axis in pairs))

    def __str__(self) -> str:
        """For each dimension the axes that divide it, or a dash, as in "- model"."""
        names = [
            "+".join(str(cut) for cut in self.cuts if cut.dimension == dimension)
            for dimension in range(len(self.shape))
        ]
        return " ".join(each or "-" for each in names)

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


def owners(sizes: Sequence[int], count: int) -> list[int]:
    """For each of some tensors the process that is to own it: the largest first, where least is.

    Args:
        sizes: the bytes of each tensor.
        count: the number of processes.
    """
    chosen, loads = [0] * len(sizes), [0] * count
    for index in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        chosen[index] = min(range(count), key=lambda each: (loads[each], each))
        loads[chosen[index]] += sizes[index]
    return chosen


def writers(regions: Sequence[Region], loads: list[int]) -> dict[int, Region]:
    """For each region of a tensor one of the processes that have it: that with least to write.

    Regions without elements have none.

    Args:
        regions: each process's.
        loads: the elements that each process writes already; those of the tensor are added.
    """
    holders: dict[Region, list[int]] = {}
    for rank, region in enumerate(regions):
        if region.size:
            holders.setdefault(region, []).append(rank)
    chosen: dict[int, Region] = {}
    for region, ranks in holders.items():
        rank = min(ranks, key=lambda each: (loads[each], each))
        loads[rank] += region.size
        chosen[rank] = region
    return chosen
