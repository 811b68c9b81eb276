"""The parts of tensors that are computed from gathered ones, number by number.

A cast, a soft cap or a mask between the layer of the logits and the loss are computed of the part
too, so that the logits need not be gathered for them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist._tf.graphs import constant_of, run_again
from tfdist.comm.batch_dependence import is_symbolic
from tfdist.comm.replica_collectives import Link
from tfdist.keras.batch_axes import ELEMENTWISE
from tfdist.sharding.relayout import Part, copied, part_of, remembered
from tfdist.types import Operation, Tensor

__all__ = ["part_behind"]

#: Operations between a tensor and a gathered one, at most.
_DEPTH = 40

#: Operations whose operands are broadcast from the last dimension on.
_ALIGNED = ELEMENTWISE - {"Select", "EnsureShape"}


def part_behind(link: Link, tensor: Any) -> Part | None:
    """This member's part of a tensor, computed anew from that of a gathered one.

    Args:
        link: the members of the axis.
        tensor: any value; only a tensor of the graph that is being traced is looked behind.

    Returns:
        The part, with its gradient; None if the tensor is not computed element by element, or is
        not from a gathered one.
    """
    if not is_symbolic(tensor) or tensor.graph is not tf.compat.v1.get_default_graph():
        return None
    return _Search(link).part_of(tensor, _DEPTH)


class _Search:
    """A search for gathered tensors, from one tensor back through the graph.

    Args:
        link: the members of the axis.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._found: dict[int, Part | None] = {}

    def part_of(self, tensor: Tensor, depth: int) -> Part | None:
        """The part of a tensor, at most so many operations after a gathered one."""
        if remembered(tensor) is not None or depth == 0 or not tensor.shape.rank:
            return remembered(tensor)
        if id(tensor) not in self._found:
            self._found[id(tensor)] = self._computed(tensor, depth - 1)
        return self._found[id(tensor)]

    def _computed(self, tensor: Tensor, depth: int) -> Part | None:
        op = tensor.op
        if op.type == "EnsureShape":
            return self.part_of(op.inputs[0], depth)
        if op.type == "Transpose":
            order = constant_of(op.inputs[1])
            part = None if order is None else self.part_of(op.inputs[0], depth)
            if part is None:
                return None
            return Part(tf.transpose(part.value, order), [*order].index(part.dimension))
        return self._element_by_element(tensor, depth) if _is_aligned(op) else None

    def _element_by_element(self, tensor: Tensor, depth: int) -> Part | None:
        inputs = list(tensor.op.inputs)
        parts = [self.part_of(each, depth) for each in inputs]
        dimensions = {
            part.dimension - len(each.shape)
            for part, each in zip(parts, inputs, strict=True)
            if part is not None
        }
        if len(dimensions) != 1:
            return None
        from_end = dimensions.pop()
        operands = [
            self._of_whole(each, from_end, tensor.shape[from_end]) if part is None else part.value
            for part, each in zip(parts, inputs, strict=True)
        ]
        if any(each is None for each in operands):
            return None
        return Part(run_again(tensor.op, operands)[0], len(tensor.shape) + from_end)

    def _of_whole(self, tensor: Tensor, from_end: int, size: int) -> Tensor | None:
        """An operand that each member has whole, for its part of a result.

        Args:
            tensor: the operand.
            from_end: the divided dimension of the result, from the end.
            size: the size of that.
        """
        rank = tensor.shape.rank
        if rank is None:
            return None
        if rank < -from_end or tensor.shape[from_end] == 1:
            return copied(self._link, tensor) if tensor.dtype.is_floating else tensor
        same = tensor.shape[from_end] == size
        return part_of(self._link, tensor, rank + from_end) if same else None


def _is_aligned(op: Operation) -> bool:
    """Whether each element of a result is computed from those at its place in the operands."""
    by_last = op.type != "BiasAdd" or op.get_attr("data_format") == b"NHWC"
    return op.type in _ALIGNED and by_last
