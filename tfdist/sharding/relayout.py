"""Changes of layout over an axis of a mesh along which processes have the same examples.

Each is a collective, or none, whose gradient is its transpose (Megatron-LM, arXiv:1909.08053). All
members of the axis compute the same with what is whole, so the gradient of a whole tensor is the
same on each, and that of a part is its member's own:

    function    forward              gradient
    copied      the tensor           summed
    summed      the members' sum     copied
    whole_of    the parts gathered   part_of
    part_of     the own part         whole_of

A gathered tensor remembers its part. A layer that can compute with the part takes it, and the
gather, which nothing reads then, is not made (`tfdist.sharding.deferred`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfdist._tf.distribute import independently
from tfdist.comm.replica_collectives import Link, is_sparse
from tfdist.sharding.deferred import if_read
from tfdist.sharding.exchange import gather, slice_of
from tfdist.sharding.layout import Cut
from tfdist.types import Gradient, Tensor

__all__ = [
    "Part",
    "copied",
    "part_of",
    "remember",
    "remembered",
    "slice_along",
    "summed",
    "whole_of",
    "whole_weight_of",
]

#: The attribute of a tensor that has been gathered.
_PART = "_tfdist_part"


SomeTensor = TypeVar("SomeTensor")


class Part(NamedTuple):
    """A member's part of a tensor.

    Attributes:
        value: the part.
        dimension: the divided dimension, from 0 on.
    """

    value: Any
    dimension: int


def remember(whole: SomeTensor, part: Part) -> SomeTensor:
    """Notes a tensor's part on it; returns the tensor."""
    setattr(whole, _PART, part)
    return whole


def remembered(whole: object) -> Part | None:
    """The part of a tensor that has been gathered of parts; None for others."""
    part: Part | None = getattr(whole, _PART, None)
    return part


def copied(link: Link, tensor: Tensor) -> Tensor:
    """A whole tensor, which each member is going to use a part of a layer with."""

    def forward(value: Tensor) -> tuple[Tensor, Any]:
        return tf.identity(value), lambda upstream: summed(link, tf.convert_to_tensor(upstream))

    return _differentiated(forward, tensor)


def summed(link: Link, tensor: Tensor) -> Tensor:
    """The sum of the members' tensors."""

    def forward(value: Tensor) -> tuple[Tensor, Any]:
        with independently():
            total = link.sum([value])[0]
        return total, lambda upstream: copied(link, tf.convert_to_tensor(upstream))

    return _differentiated(forward, tensor)


def whole_of(link: Link, part: Part) -> Tensor:
    """The members' parts, one after the other along their dimension; it remembers the part."""

    def forward(value: Tensor) -> tuple[Tensor, Any]:
        def backward(upstream: Gradient) -> Tensor:
            return part_of(link, tf.convert_to_tensor(upstream), part.dimension)

        def whole() -> Tensor:
            return _gathered(link, value, part.dimension)

        return if_read(value, part.dimension, link.count, whole), backward

    return remember(_differentiated(forward, part.value), part)


def part_of(link: Link, whole: Tensor, dimension: int) -> Tensor:
    """This member's part of a tensor along a dimension, whose size the members divide."""
    size = whole.shape[dimension] // link.count

    def forward(value: Tensor) -> tuple[Tensor, Any]:
        def backward(upstream: Gradient) -> Tensor:
            return whole_of(link, Part(tf.convert_to_tensor(upstream), dimension))

        return slice_along(value, dimension, int(link.index) * size, size), backward

    return _differentiated(forward, whole)


def whole_weight_of(link: Link, part: Tensor, cut: Cut) -> Tensor:
    """A whole weight of the members' parts; the gradient of each is its part of the whole one's."""

    def forward(value: Tensor) -> tuple[Tensor, Any]:
        def backward(upstream: Gradient) -> Gradient:
            if is_sparse(upstream):
                rows: Gradient = slice_of(upstream, cut)
                return rows
            return part_of(link, upstream, cut.dimension)

        def whole() -> Tensor:
            with independently():
                return gather(link, [value], [cut])[0]

        return if_read(value, cut.dimension, link.count, whole), backward

    return remember(_differentiated(forward, part), Part(part, cut.dimension))


def slice_along(value: Tensor, dimension: int, start: Any, size: int) -> Tensor:
    """Some positions of a dimension."""
    before = [slice(None)] * dimension
    return value[(*before, slice(start, start + size))]


def _gathered(link: Link, part: Tensor, dimension: int) -> Tensor:
    """The parts of all members, of the same shape, which need not be known."""
    with independently():
        flat = link.gather(tf.reshape(part, [-1]))
    rank = len(part.shape)
    by_member = tf.reshape(flat, tf.concat([[link.count], tf.shape(part)], 0))
    order = [*range(1, dimension + 1), 0, *range(dimension + 1, rank + 1)]
    times = [link.count if each == dimension else 1 for each in range(rank)]
    whole = tf.reshape(tf.transpose(by_member, order), tf.shape(part) * tf.constant(times))
    sizes = part.shape.as_list()
    sizes[dimension] *= link.count
    complete: Tensor = tf.ensure_shape(whole, sizes)
    return complete


def _differentiated(forward: Callable[[Tensor], tuple[Tensor, Any]], tensor: Tensor) -> Tensor:
    result: Tensor = tf.custom_gradient(forward)(tensor)
    return result
