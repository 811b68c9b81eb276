"""The order of the examples in the tensors of a step, and ops that choose them by their places.

On a replica an example has other neighbours than in one process, and another one is the first. So a
step that adds the reversed batch to itself, or that takes every second example, computes something
else on a part of the batch. As in `example_pairs.py`, that is read off the graph, and nothing is
claimed of what is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfdist._tf.graphs import constant_of
from tfdist.comm.batch_dependence import Dependence
from tfdist.types import Operation, Tensor

__all__ = ["Orders", "measured_by"]

#: The moves of the examples, a key for each; empty for the order of the batch. None if it is not
#: known, as behind batches that were put end to end.
Order: TypeAlias = tuple[Hashable, ...] | None
_NATURAL: Order = ()
#: The number of ops by which the indices of a gather are compared.
_DEPTH = 12
#: Ops that keep the order of their first input's examples.
_KEEPING = frozenset(
    {
        *("Identity", "StopGradient", "PreventGradient", "EnsureShape", "Transpose", "ExpandDims"),
        *("Squeeze", "StridedSlice", "Slice", "Sum", "Mean", "Max", "Min", "Prod", "ArgMax", "Pad"),
        *("PadV2", "MirrorPad", "OneHot", "Elu", "Selu", "LeakyRelu", "Conv2D", "Conv3D"),
        *("DepthwiseConv2dNative", "MaxPool", "AvgPool", "FusedBatchNormV3", "Pack"),
        "CollectiveReduceV2",
    }
)
#: The places of the inputs that an op splits, and that give the axis.
_SPLITS = {"Split": (1, 0), "SplitV": (0, 2)}
#: The places of the inputs that give the axes along which an op moves its first input.
_MOVES = {"ReverseV2": 1, "Roll": 2, "GatherV2": 2}


class _Rows(NamedTuple):
    """The key of a reshape that gives each example several rows, such as its time steps."""

    each: Fraction


class Orders:
    """The order of the examples in each tensor of a search, found from those of its inputs.

    Args:
        axes: the axes along which a tensor holds examples.
        depends: whether a tensor depends on the batch.
        combining: the types of ops that compute a number from several at the same place.
        joined: tensors, by `id`, of whose order nothing is known.
    """

    def __init__(
        self,
        axes: Callable[[Tensor], frozenset[int]],
        depends: Dependence,
        combining: Collection[str],
        joined: Collection[int] = (),
    ) -> None:
        self._axes, self._depends, self._combining = axes, depends, combining
        self._orders: dict[int, Order] = dict.fromkeys(joined)
        self._keys: dict[tuple[str, int], int] = {}
        self._alike: dict[Hashable, int] = {}

    def is_natural(self, tensor: Tensor) -> bool:
        """Whether the examples are in the order of the batch."""
        return self._orders.get(id(tensor), _NATURAL) == _NATURAL

    def follow(self, tensor: Tensor, own: frozenset[int]) -> None:
        """Notes the order of a tensor that holds examples along `own`."""
        order = self._order_of(tensor.op, own) if own else _NATURAL
        if tensor.op.type == "IdentityN":  # As of a function with a gradient of its own.
            order = self._orders.get(id(tensor.op.inputs[tensor.value_index]), _NATURAL)
        if tensor.op.type == "Placeholder" and self._depends.is_component(tensor):
            order = None
        if order != _NATURAL:
            self._orders[id(tensor)] = order

    def meet(self, op: Operation) -> bool:
        """Whether an op combines examples at different places, or chooses them by their places."""
        if op.type in self._combining:
            orders = {o for o in self._of_inputs(op) if o is not None and not _has_rows(o)}
            return len(orders) > 1
        if op.type == "Reshape" and not _has_rows(self._orders.get(id(op.inputs[0]), _NATURAL)):
            each = _rows_for_each(op, self._axes(op.inputs[0]))
            return each is not None and each < 1
        return self.choose(op)

    def choose(self, op: Operation) -> bool:
        """Whether an op chooses some of the examples by their places in the batch."""
        place = _SPLITS[op.type][0] if op.type in _SPLITS else 0
        taken = op.inputs[place : place + 1]
        axes = frozenset().union(*(self._axes(x) for x in taken))
        has_rows = any(_has_rows(self._orders.get(id(x), _NATURAL)) for x in taken)
        return bool(axes) and not has_rows and self._takes_by_place(op, axes)

    def _of_inputs(self, op: Operation) -> list[Order]:
        return [self._orders.get(id(x), _NATURAL) for x in op.inputs if self._axes(x)]

    def _order_of(self, op: Operation, own: frozenset[int]) -> Order:
        found = self._of_inputs(op)
        if not found:
            return _NATURAL
        first = found[0]
        chooses = op.type == "GatherV2" and bool(self._axes(op.inputs[0]))
        if first is None or (not chooses and any(order != first for order in found)):
            return None
        if op.type == "Reshape":
            return _reshaped(first, _rows_for_each(op, self._axes(op.inputs[0])))
        if op.type == "ConcatV2":
            at, rank = constant_of(op.inputs[-1]), op.outputs[0].shape.rank
            return None if at is None or rank is None or int(at) % rank in own else first
        moved = self._move_of(op)
        if moved is not None:
            undone = op.type in ("ReverseV2", "StridedSlice") and first[-1:] == (moved,)
            return first[:-1] if undone else (*first, moved)
        known = op.type in self._combining or op.type in _KEEPING or op.type in _MOVES
        return first if known else None

    def _move_of(self, op: Operation) -> Hashable | None:
        """The key of an op that moves examples; None for another."""
        if op.type == "RandomShuffle":
            return op.name if 0 in self._axes(op.inputs[0]) else None
        if op.type == "StridedSlice":
            own = self._axes(op.inputs[0])
            backwards = [axis for i, axis in _axes_read(op) if axis in own and _is_backwards(op, i)]
            return ("backwards", *backwards) if backwards else None
        if op.type not in _MOVES:
            return None
        along, rank = constant_of(op.inputs[_MOVES[op.type]]), op.inputs[0].shape.rank
        if along is None or rank is None:
            return None
        moves = {int(axis) % rank for axis in along.reshape([-1])} & self._axes(op.inputs[0])
        if not moves or (op.type == "GatherV2" and self._keeps_all(op.inputs[1])):
            return None
        return (op.type, self._key_of(op.inputs[1], _DEPTH))

    def _keeps_all(self, indices: Tensor) -> bool:
        """Whether indices are read off values, or are all places in order.

        `tf.vectorized_map` takes these, under the condition that there is more than one.
        """
        op = indices.op
        while op.type in ("Cast", "Identity", "SelectV2"):
            is_choice = op.type == "SelectV2"
            if is_choice and op.inputs[0].shape.rank != 0:
                break
            op = op.inputs[int(is_choice)].op
        if op.type == "Range":
            start, delta = (tf.get_static_value(op.inputs[i]) for i in (0, 2))
            return start == 0 and delta == 1 and self._is_length(op.inputs[1])
        return _is_read_off(indices)

    def _key_of(self, tensor: Tensor, depth: int) -> int:
        """A number that tensors have in common that are computed alike from the same ones."""
        op = tensor.op
        name = (op.name, tensor.value_index)
        if name not in self._keys:
            like: Hashable = name
            if op.type == "Const":
                value = tf.get_static_value(tensor)
                like = ("Const", value.tobytes(), value.shape)
            elif depth and op.inputs and not op.op_def.is_stateful:
                inputs = tuple(self._key_of(each, depth - 1) for each in op.inputs)
                attributes = op.node_def.attr.items()
                alike = tuple(sorted((k, v.SerializeToString()) for k, v in attributes))
                like = (op.type, tensor.value_index, alike, inputs)
            self._keys[name] = self._alike.setdefault(like, len(self._alike))
        return self._keys[name]

    def _takes_by_place(self, op: Operation, axes: frozenset[int]) -> bool:
        if op.type in _SPLITS:
            along = constant_of(op.inputs[_SPLITS[op.type][1]])
            rank = op.outputs[0].shape.rank
            return len(op.outputs) > 1 and _is_among(along, rank, axes)
        if op.type == "Unpack":
            return _is_among(op.get_attr("axis"), op.inputs[0].shape.rank, axes)
        if op.type == "StridedSlice":
            return any(axis in axes and not self._is_all(op, i) for i, axis in _axes_read(op))
        if op.type == "Slice":
            begin, size = (constant_of(each) for each in op.inputs[1:])
            known = begin is not None and size is not None
            return known and any(begin[axis] != 0 or size[axis] != -1 for axis in axes)
        return op.type == "GatherV2" and bool(self._move_of(op)) and _is_of_places(op.inputs[1])

    def _is_all(self, op: Operation, i: int) -> bool:
        """Whether the `i`-th part of a slice's index takes all along its axis, as `:` does.

        So does `::-1`, in another order.
        """
        if op.get_attr("shrink_axis_mask") >> i & 1:
            return False
        if _is_backwards(op, i):
            return True
        begin, end, step = (_element(each, i) for each in op.inputs[1:4])
        from_start = op.get_attr("begin_mask") >> i & 1 or (isinstance(begin, int) and begin == 0)
        if not from_start or not isinstance(step, int) or step != 1:
            return False
        return bool(op.get_attr("end_mask") >> i & 1) or self._is_length(end)

    def _is_length(self, number: Any) -> bool:
        return (
            isinstance(number, tf.Tensor)
            and measured_by(number) is not None
            and self._depends(number)
        )


def measured_by(number: Tensor) -> Tensor | None:
    """The tensor of which a symbolic number is a length, or the largest of several; or None."""
    while number.op.type in ("Cast", "Identity", "Max", "Pack"):
        number = number.op.inputs[0]
    if number.op.type != "StridedSlice" or number.op.inputs[0].op.type != "Shape":
        return None
    measured: Tensor = number.op.inputs[0].op.inputs[0]
    return measured


def _has_rows(order: Order) -> bool:
    """Whether a place is not one of an example, or not known to be."""
    return order is None or any(isinstance(key, _Rows) for key in order)


def _rows_for_each(op: Operation, axes: frozenset[int]) -> Fraction | None:
    """The rows that a reshape makes of an example's one; None if that is not known."""
    old, new = op.inputs[0].shape, op.outputs[0].shape
    if axes != {0} or not old.rank or not new.rank:
        return None
    before, after = old[1:].num_elements(), new[1:].num_elements()
    return Fraction(before, after) if before and after else None


def _reshaped(order: tuple[Hashable, ...], each: Fraction | None) -> Order:
    if each is None or each == 1:
        return None if each is None else order
    if each > 1:
        return (*order, _Rows(each))
    return order[:-1] if order[-1:] == (_Rows(1 / each),) else None


def _is_among(axis: Any, rank: int | None, axes: frozenset[int]) -> bool:
    return axis is not None and rank is not None and int(axis) % rank in axes


def _axes_read(op: Operation) -> Iterator[tuple[int, int]]:
    """The parts of a slice's index that are ranges or numbers, each with the axis that it reads."""
    rank, count = op.inputs[0].shape.rank, op.inputs[1].shape[0]
    if rank is None or count is None:
        return
    new, rest = op.get_attr("new_axis_mask"), op.get_attr("ellipsis_mask")
    read = sum(not (new >> i & 1 or rest >> i & 1) for i in range(count))
    axis = 0
    for i in range(count):
        if rest >> i & 1:
            axis += rank - read
        elif not new >> i & 1:
            yield i, axis
            axis += 1


def _element(vector: Tensor, i: int) -> Any:
    """An element of a vector: a number, the tensor that it is, or None if neither is known."""
    static = tf.get_static_value(vector)
    if static is not None:
        return int(static[i])
    if vector.op.type != "Pack":
        return None
    number = tf.get_static_value(vector.op.inputs[i])
    return vector.op.inputs[i] if number is None else int(number)


def _is_backwards(op: Operation, i: int) -> bool:
    """Whether the `i`-th part of a slice's index is `::-1`."""
    step = _element(op.inputs[3], i)
    both = op.get_attr("begin_mask") & op.get_attr("end_mask")
    return isinstance(step, int) and step == -1 and bool(both >> i & 1)


def _sources_of(indices: Tensor) -> set[str]:
    """The types of the ops that indices are computed from: what has no inputs, or is random."""
    sources, seen, waiting = set(), set(), [indices]
    while waiting:
        op = waiting.pop().op
        if op.type in ("Shape", "ShapeN", "Size") or op.name in seen:
            continue
        seen.add(op.name)
        if not op.inputs or op.op_def.is_stateful:
            sources.add(op.type)
        else:
            waiting.extend(op.inputs)
    return sources


def _is_of_places(indices: Tensor) -> bool:
    """Whether indices are computed from constants and lengths alone, and not at random."""
    return _sources_of(indices) <= {"Const"}


def _is_read_off(indices: Tensor) -> bool:
    """Whether indices are computed from values of the batch, as those of `tf.boolean_mask` are."""
    return any(each != "Const" and "Random" not in each for each in _sources_of(indices))
