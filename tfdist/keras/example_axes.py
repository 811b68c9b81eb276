"""The axes along which the tensors of a traced step hold the examples of a batch.

Unlike `batch_axes.py`, which finds the one axis of a batch, this follows several: a tensor that has
the examples along two axes is about pairs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import tensorflow as tf

from tfdist._tf.graphs import constant_of
from tfdist.comm.batch_dependence import Dependence
from tfdist.keras.batch_axes import ELEMENTWISE, is_by_class, reduced_axes
from tfdist.types import Operation, Tensor

__all__ = [
    "BESIDE",
    "BESIDE_EACH_OTHER",
    "BROADCASTING",
    "CONTRACTING",
    "MOVING_PLACES",
    "NO_EXAMPLES",
    "OF_SIZES",
    "REDUCING",
    "ROWS",
    "SIZES",
    "Axes",
    "axes_of",
    "is_reduction",
    "runs_along",
    "values_of",
]

#: The axes along which a tensor holds the examples of a batch.
Axes: TypeAlias = frozenset[int]
#: Of a tensor that does not hold one row, or one column, for each example.
NO_EXAMPLES: Axes = frozenset()
#: Of a tensor that holds one row for each example, as the outputs of a model do.
ROWS: Axes = frozenset({0})
REDUCING = frozenset(
    {"Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin", "EuclideanNorm"}
)


def values_of(op: Operation) -> list[Tensor]:
    """The inputs that the result's elements are made of, without those that give its size.

    A size may be the length of the longest row.
    """
    lengths = _LENGTHS.get(op.type, ())
    return [x for i, x in enumerate(op.inputs) if i not in lengths]


def runs_along(op: Operation, axes: Callable[[Tensor], Axes]) -> bool:
    """Whether each element of the result is computed from those of all examples."""
    rank = _rank(op)
    if op.type in _OF_MATRICES:
        return rank is not None and not {rank - 1, rank - 2}.isdisjoint(axes(op.inputs[0]))
    if op.type not in (*_ALONG_LAST, *_ALONG_GIVEN) or not rank:
        return False
    if op.type == "Cumsum" and not op.inputs[0].dtype.is_floating:
        return False  # The places of the rows of ragged examples, one after the other.
    at = -1 if op.type in _ALONG_LAST else constant_of(op.inputs[1])
    return at is not None and int(at) % rank in axes(op.inputs[0])


def is_reduction(tensor: Tensor, axes: Callable[[Tensor], Axes], depends: Dependence) -> bool:
    """Whether a tensor that has nothing by example is computed from all examples."""
    op, types = tensor.op, {*REDUCING, *CONTRACTING, *_INTO_GIVEN, "L2Loss"}
    reduces = op.type in types or _counts_repeats(tensor) or is_by_class(op, depends)
    return reduces and any(axes(x) for x in op.inputs)


def _counts_repeats(tensor: Tensor) -> bool:
    """Whether a tensor has how often each value occurs in a batch."""
    return tensor.op.type.startswith("UniqueWithCounts") and tensor.value_index == 2


def axes_of(tensor: Tensor, axes: Callable[[Tensor], Axes], depends: Dependence) -> Axes:
    """The axes along which a tensor holds the examples.

    Args:
        tensor: a symbolic tensor.
        axes: those of the inputs of its op.
        depends: whether a tensor depends on the batch.
    """
    op, rank = tensor.op, tensor.shape.rank
    if tensor.dtype == tf.variant:  # A list of rows, as `tf.map_fn` makes.
        made = op.type == "TensorListFromTensor"
        rows = any(0 in axes(x) for x in op.inputs if made or x.dtype == tf.variant)
        return ROWS if rows else NO_EXAMPLES
    apart = op.type in SIZES or is_by_class(op, depends) or _counts_repeats(tensor)
    if not rank or apart or not depends(tensor):
        return NO_EXAMPLES
    if op.type in _RULES:
        return _RULES[op.type](op, axes)
    if op.type == "Placeholder" or op.op_def.is_stateful:  # An argument, or what an iterator gives.
        return NO_EXAMPLES if "Random" in op.type else ROWS
    if op.type in REDUCING:
        return _reduced(op, axes)
    if op.type in BROADCASTING:
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
    order = constant_of(op.inputs[1])
    own = axes(op.inputs[0])
    return (
        NO_EXAMPLES if order is None else frozenset(i for i, a in enumerate(order) if int(a) in own)
    )


def _expanded(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    at = constant_of(op.inputs[1])
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


def _rank(op: Operation) -> int | None:
    return op.inputs[0].shape.rank if op.inputs else None


def _concatenated(op: Operation, axes: Callable[[Tensor], Axes]) -> Axes:
    """An axis of examples beside something else, such as positions, does not count as one."""
    *parts, at = op.inputs
    axis, rank = constant_of(at), op.outputs[0].shape.rank
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
    axis, more = constant_of(at), indices.shape.rank
    if axis is None or more is None or values.shape.rank is None or op.get_attr("batch_dims"):
        return ROWS if 0 in axes(values) & axes(indices) else NO_EXAMPLES
    axis = int(axis) % values.shape.rank
    if more == 1 and axis in axes(values):  # Some of the examples, or all in another order.
        return axes(values)
    kept = {each + (more - 1) * (each > axis) for each in axes(values) - {axis}}
    return frozenset(kept | {axis + each for each in axes(indices)})


#: Ops that relate an example's values in one input to those in another.
BESIDE_EACH_OTHER = frozenset(
    {
        *("Pack", "ConcatV2", "SparseSoftmaxCrossEntropyWithLogits"),
        *("SoftmaxCrossEntropyWithLogits", "InTopKV2"),
    }
)
#: Ops that put values of several inputs into one row, or choose by one what is done to others.
BESIDE = frozenset(
    {"GatherV2", "GatherNd", "ConcatV2", "If", "StatelessIf", "Case", "StatelessCase"}
)
CONTRACTING = frozenset({"MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"})
#: Ops that put rows into a tensor that is given.
_INTO_GIVEN = frozenset(
    {
        *("TensorScatterAdd", "TensorScatterSub", "TensorScatterUpdate"),
        *("TensorScatterMax", "TensorScatterMin"),
    }
)
_RULES: dict[str, Callable[[Operation, Callable[[Tensor], Axes]], Axes]] = {
    **dict.fromkeys(_INTO_GIVEN, lambda op, axes: axes(op.inputs[0])),
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
    "TensorListGetItem": lambda op, axes: NO_EXAMPLES,  # One example of a list of rows.
    "RandomShuffle": lambda op, axes: axes(op.inputs[0]),
}
SIZES = frozenset({"Shape", "ShapeN", "Size"})
#: Ops that make another size of the sizes that come first among their inputs.
OF_SIZES = frozenset({"StridedSlice", "Prod", "Mul", "Cast", "GatherV2", "Identity", "Reshape"})
#: Ops that arrange the places of the examples in another shape.
MOVING_PLACES = frozenset(
    {"ExpandDims", "OneHot", "Reshape", "StridedSlice", "Transpose", "BroadcastTo", "Tile"}
)
#: The places of inputs that are lengths, or numbers of copies.
_LENGTHS = {"Range": (0, 1, 2), "Tile": (1,), "Reshape": (1,), "BroadcastTo": (1,), "Fill": (0,)}
_ALONG_LAST = frozenset({"Softmax", "LogSoftmax", "TopKV2", "InTopKV2", "FFT", "RFFT"})
#: Ops that compute with whole matrices, along the last two axes.
_OF_MATRICES = frozenset(
    {
        *("Svd", "Qr", "Cholesky", "SelfAdjointEigV2", "Eig", "MatrixInverse", "MatrixSolve"),
        *("MatrixDeterminant", "LogMatrixDeterminant", "MatrixSolveLs", "Lu"),
    }
)
_ALONG_GIVEN = frozenset({"Cumsum", "Cumprod", "CumulativeLogsumexp"})
#: Ops that compute each element from the elements at its place, after broadcasting from the right.
#: `Select`, of TensorFlow 1, has a condition for each row.
BROADCASTING = (ELEMENTWISE - {"Select"}) | {"FloorMod", "LogSoftmax", "Softmax"}
