"""Losses in which the examples of a batch meet: contrastive ones, and those with statistics.

Each replica has its own examples only, so a loss of all pairs of a batch has fewer pairs there than
in one process. That is read off the graph: a tensor that has the examples along two axes is about
pairs of them, and an example meets all others in what is reduced from them, such as the batch's
mean. The axes are followed through the ops that are known here; if an op hides them, nothing is
claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import tensorflow as tf

from tfdist.comm.batch_dependence import Dependence
from tfdist.keras.reductions import ELEMENTWISE, reduced_axes
from tfdist.types import Operation, Tensor

__all__ = ["NO_EXAMPLES", "ROWS", "axes_of", "meeting_of"]

#: The axes along which a tensor holds the examples of a batch.
Axes: TypeAlias = frozenset[int]
#: Of a tensor that does not hold one row, or one column, for each example.
NO_EXAMPLES: Axes = frozenset()
#: Of a tensor that holds one row for each example, as the outputs of a model do.
ROWS: Axes = frozenset({0})
_REDUCING = frozenset(
    {"Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin", "EuclideanNorm"}
)


def axes_of(tensor: Tensor, depends: Dependence, known: Mapping[int, Axes]) -> Axes:
    """The axes along which a tensor holds the examples; for the arguments see `meeting_of`."""
    axes = dict(known)
    _search(tensor, depends, axes, lambda op, own, from_reduced: False)
    return axes[id(tensor)]


def meeting_of(
    target: Tensor, depends: Dependence, known: Mapping[int, Axes], *, statistics: bool = False
) -> str | None:
    """Finds where examples meet on the way to a tensor.

    Args:
        target: a loss, symbolic.
        depends: whether a tensor depends on the batch.
        known: the axes of examples of some tensors, by `id`; the search goes no further than these.
        statistics: whether an example also meets the others in a number that is reduced from all of
            them, such as the batch's mean.

    Returns:
        The first op found, by name and type, or None.
    """
    axes = dict(known)

    def meets(op: Operation, own: Axes, from_reduced: bool) -> bool:
        mixes = op.type in _BROADCASTING | _CONTRACTING | _BESIDE
        runs = _runs_along(op, lambda x: axes.get(id(x), NO_EXAMPLES))
        return len(own) > 1 or (statistics and bool((own and from_reduced and mixes) or runs))

    op = _search(target, depends, axes, meets)
    return None if op is None else f"{op.name!r}, {op.type}"


def _search(
    target: Tensor,
    depends: Dependence,
    known: dict[int, Axes],
    ends: Callable[[Operation, Axes, bool], bool],
) -> Operation | None:
    """Finds the axes of the tensors that a tensor is computed from, each after its inputs.

    Args:
        target: see `meeting_of`.
        depends: see `meeting_of`.
        known: the axes of some tensors; those of the others are added.
        ends: whether to stop at an op: it gets the op, the axes of its result, and whether an input
            is reduced from all examples.

    Returns:
        The op at which the search has stopped, or None.
    """
    reduced: set[int] = set()
    waiting = [target]

    def axes(x: Tensor) -> Axes:
        return known.get(id(x), NO_EXAMPLES)

    while waiting:
        tensor = waiting[-1]
        if id(tensor) in known:
            waiting.pop()
            continue
        op = tensor.op
        inputs = () if op.type in _SIZES else op.inputs  # A shape holds none of the values.
        unknown = [x for x in inputs if id(x) not in known and depends(x)]
        if unknown:
            waiting.extend(unknown)
            continue
        known[id(tensor)] = own = _axes_of(tensor, axes, depends)
        from_reduced = any(id(x) in reduced for x in _values_of(op))
        if ends(op, own, from_reduced):
            return op
        if not own and (from_reduced or _is_reduction(op, axes)):
            reduced.add(id(tensor))
        waiting.pop()
    return None


def _values_of(op: Operation) -> list[Tensor]:
    """The inputs that the result's elements are made of, without those that give its size.

    A size may be the length of the longest row.
    """
    lengths = _LENGTHS.get(op.type, ())
    return [x for i, x in enumerate(op.inputs) if i not in lengths]


def _runs_along(op: Operation, axes: Callable[[Tensor], Axes]) -> bool:
    """Whether each element of the result is computed from those of all examples."""
    if op.type not in (*_ALONG_LAST, *_ALONG_GIVEN) or not op.inputs[0].shape.rank:
        return False
    at = -1 if op.type in _ALONG_LAST else tf.get_static_value(op.inputs[1])
    return at is not None and int(at) % op.inputs[0].shape.rank in axes(op.inputs[0])


def _is_reduction(op: Operation, axes: Callable[[Tensor], Axes]) -> bool:
    """Whether an op that returns nothing by example reduces all examples."""
    return op.type in {*_REDUCING, *_CONTRACTING, "L2Loss"} and any(axes(x) for x in op.inputs)


def _axes_of(tensor: Tensor, axes: Callable[[Tensor], Axes], depends: Dependence) -> Axes:
    op, rank = tensor.op, tensor.shape.rank
    if not rank or op.type in _SIZES or not depends(tensor):
        return NO_EXAMPLES
    if op.type in _RULES:
        return _RULES[op.type](op, axes)
    if op.type == "Placeholder" or op.op_def.is_stateful:  # An argument, or what an iterator gives.
        return NO_EXAMPLES if "Random" in op.type else ROWS
    if op.type in _REDUCING:
        return _reduced(op, axes)
    if op.type in _BROADCASTING:
        return frozenset(
            axis + rank - x.shape.rank
            for x in op.inputs
            for axis in axes(x)
            if x.shape.rank is not None and x.shape.rank <= rank
        )
    # An op that is not known here keeps the examples apart, as layers do, or hides where they are.
    return ROWS if any(0 in axes(x) for x in op.inputs) else NO_EXAMPLES


def _without(axes: Axes, gone: Iterable[int]) -> Axes:
    """The axes of a tensor once some of all its axes are gone."""
    gone = set(gone)
    return frozenset(axis - sum(each < axis for each in gone) for axis in axes - gone)


def _reduced(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    gone = reduced_axes(op)
    if op.type not in ("ArgMax", "ArgMin") and op.get_attr("keep_dims"):
        return axes(op.inputs[0]) - set(gone)
    return _without(axes(op.inputs[0]), gone)


def _transposed(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    order = tf.get_static_value(op.inputs[1])
    own = axes(op.inputs[0])
    return (
        NO_EXAMPLES if order is None else frozenset(i for i, a in enumerate(order) if int(a) in own)
    )


def _expanded(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    at = tf.get_static_value(op.inputs[1])
    if at is None or op.outputs[0].shape.rank is None:
        return NO_EXAMPLES
    new = int(at.reshape([-1])[0]) % op.outputs[0].shape.rank
    return frozenset(axis + (axis >= new) for axis in axes(op.inputs[0]))


def _squeezed(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    rank, gone = op.inputs[0].shape.rank, op.get_attr("squeeze_dims")
    if rank is None or not gone:
        return NO_EXAMPLES
    return _without(axes(op.inputs[0]), (axis % rank for axis in gone))


def _reshaped(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    """Follows the one axis of open length; examples that come first stay first otherwise."""
    own, new = axes(op.inputs[0]), op.outputs[0].shape
    if len(own) != 1:
        return NO_EXAMPLES
    (axis,), old = own, op.inputs[0].shape
    is_open = [i for i, size in enumerate(new) if size is None]
    if [i for i, size in enumerate(old) if size is None] == [axis] and len(is_open) == 1:
        return frozenset(is_open)
    return own if axis == 0 else NO_EXAMPLES


def _sliced(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    """Follows `x[:, None]`, `x[..., 0]` and the like."""
    rank, count = op.inputs[0].shape.rank, op.inputs[1].shape[0]
    if rank is None or count is None:
        return NO_EXAMPLES
    new, dropped, rest = (
        op.get_attr(f"{name}_mask") for name in ("new_axis", "shrink_axis", "ellipsis")
    )
    specs = range(count)
    read = sum(not (new >> i & 1 or rest >> i & 1) for i in specs)
    result: list[int | None] = []
    source = 0
    for i in specs:
        if rest >> i & 1:
            result += range(source, source + rank - read)
            source += rank - read
        elif new >> i & 1:
            result.append(None)
        else:
            result += [] if dropped >> i & 1 else [source]
            source += 1
    result += range(source, rank)
    own = axes(op.inputs[0])
    return frozenset(i for i, axis in enumerate(result) if axis in own)


def _multiplied(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    """Rows of the first factor by columns of the second; axes before these are the same."""
    left, right = op.inputs
    ranks, rank = (left.shape.rank, right.shape.rank), op.outputs[0].shape.rank
    if ranks[0] is None or ranks[1] is None or rank is None:
        return NO_EXAMPLES
    flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    row = -1 if op.get_attr(flags[0]) else -2
    column = -2 if op.get_attr(flags[1]) else -1
    found = set()
    for x, own, kept, place in (
        (left, ranks[0], row, rank - 2),
        (right, ranks[1], column, rank - 1),
    ):
        for axis in axes(x):
            from_end = axis - own
            if from_end < -2:
                found.add(rank + from_end)
            elif from_end == kept:
                found.add(place)
    return frozenset(found)


def _summed_products(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    """Einsum: an axis is where its letter is."""
    equation = op.get_attr("equation").decode()
    terms, _, result = equation.partition("->")
    if "." in equation:
        return NO_EXAMPLES
    letters = {
        term[axis] for x, term in zip(op.inputs, terms.split(","), strict=True) for axis in axes(x)
    }
    return frozenset(i for i, letter in enumerate(result) if letter in letters)


def _concatenated(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    """An axis of examples beside something else, such as positions, does not count as one."""
    *parts, at = op.inputs
    axis, rank = tf.get_static_value(at), op.outputs[0].shape.rank
    if axis is None or rank is None:
        return NO_EXAMPLES
    everywhere = frozenset.intersection(*(axes(part) for part in parts))
    anywhere = frozenset.union(*(axes(part) for part in parts))
    return everywhere if int(axis) % rank in anywhere else anywhere


def _packed(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    rank = op.outputs[0].shape.rank
    if rank is None:
        return NO_EXAMPLES
    new = op.get_attr("axis") % rank
    return frozenset(axis + (axis >= new) for part in op.inputs for axis in axes(part))


def _unpacked(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    rank = op.inputs[0].shape.rank
    if rank is None:
        return NO_EXAMPLES
    return _without(axes(op.inputs[0]), [op.get_attr("axis") % rank])


def _gathered(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    values, indices, at = op.inputs
    axis, more = tf.get_static_value(at), indices.shape.rank
    if axis is None or more is None or values.shape.rank is None or op.get_attr("batch_dims"):
        return ROWS if 0 in axes(values) & axes(indices) else NO_EXAMPLES
    axis = int(axis) % values.shape.rank
    kept = {each + (more - 1) * (each > axis) for each in axes(values) - {axis}}
    return frozenset(kept | {axis + each for each in axes(indices)})


#: Ops that put values of several inputs into one row.
_BESIDE = frozenset({"GatherV2", "ConcatV2"})
_CONTRACTING = frozenset({"MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"})
_RULES: dict[str, Callable[[Operation, Callable[[Tensor], Axes]], Axes]] = {
    "Transpose": _transposed,
    "ExpandDims": _expanded,
    "Squeeze": _squeezed,
    "Reshape": _reshaped,
    "StridedSlice": _sliced,
    "MatMul": _multiplied,
    "BatchMatMulV2": _multiplied,
    "BatchMatMulV3": _multiplied,
    "Einsum": _summed_products,
    "ConcatV2": _concatenated,
    "Pack": _packed,
    "Unpack": _unpacked,
    "GatherV2": _gathered,
    "CollectiveReduceV2": lambda op, axes: axes(op.inputs[0]),
}
_SIZES = frozenset({"Shape", "ShapeN", "Size"})
#: The places of inputs that are lengths, or numbers of copies.
_LENGTHS = {"Range": (0, 1, 2), "Tile": (1,), "Reshape": (1,), "BroadcastTo": (1,), "Fill": (0,)}
_ALONG_LAST = frozenset({"Softmax", "LogSoftmax", "TopKV2", "InTopKV2"})
_ALONG_GIVEN = frozenset({"Cumsum", "Cumprod", "CumulativeLogsumexp"})
#: Ops that compute each element from the elements at its place, after broadcasting from the right.
#: `Select`, of TensorFlow 1, has a condition for each row.
_BROADCASTING = (ELEMENTWISE - {"Select"}) | {"FloorMod", "LogSoftmax", "Softmax"}
