"""Finds the axis along which a tensor of a traced step holds the examples of a batch.

It is read off the graph, from the tensor back to the batch. A tensor of rank 1 or more from an op
that is not known here is taken to hold one row for each example, as the outputs of a model do.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist._tf.graphs import constant_of, constant_value_as_shape
from tfdist.comm.batch_dependence import Dependence
from tfdist.types import Operation, Tensor

__all__ = [
    "CHOOSING",
    "ELEMENTWISE",
    "OF_MATRICES",
    "PLACING",
    "REDUCING",
    "batch_axis",
    "contracted",
    "einsum_axes",
    "holds_chosen",
    "is_by_class",
    "is_drawn",
    "is_sum_by_class",
    "reduced_axes",
    "reduces_batch",
]

#: Ops that compute each element of their result from the elements at the same place.
ELEMENTWISE = frozenset(
    {
        *("Identity", "StopGradient", "Cast", "Neg", "AddV2", "Add", "AddN", "Sub", "Mul"),
        *("RealDiv", "Div", "DivNoNan", "MulNoNan", "Square", "Sqrt", "Rsqrt", "Pow", "Exp", "Log"),
        *("Expm1", "Log1p", "Abs", "Sign", "Maximum", "Minimum", "Sigmoid", "Tanh", "Softplus"),
        *("Relu", "SelectV2", "Select", "ClipByValue", "SquaredDifference", "Reciprocal", "Inv"),
        *("Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual", "LogicalAnd"),
        *("LogicalOr", "LogicalNot", "IsNan", "IsInf", "IsFinite", "PreventGradient", "Floor"),
        *("EnsureShape", "FloorDiv", "CheckNumerics", "Xlogy", "Sin", "Cos", "Erf"),
        "BiasAdd",
    }
)
REDUCING = frozenset({"Sum", "Mean"})
#: Reductions that are neither means nor sums.
CHOOSING = frozenset({"Max", "Min", "Prod", "All", "Any"})
#: Ops on matrices, which have a row for each example only if a matrix that they are given has.
OF_MATRICES = frozenset(
    {
        *("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Transpose", "Einsum", "MatrixInverse"),
        *("Cholesky", "MatrixSolve", "MatrixTriangularSolve", "Svd", "Qr", "SelfAdjointEigV2"),
        *("MatrixDeterminant", "LogMatrixDeterminant", "MatrixDiagPartV3", "MatrixDiagV3"),
        *("MatrixBandPart", "MatrixSetDiagV3", "MatrixSquareRoot"),
    }
)
#: Ops that add rows up by classes: which inputs are the rows' classes, and the number of classes.
_SUMS_BY_CLASS = {
    "UnsortedSegmentSum": (1, 2),
    "ScatterNd": (0, 2),
    "DenseBincount": (0, 1),
    "Bincount": (0, 1),
}
#: Ops that put rows together by classes in another way.
_CHOOSE_BY_CLASS = {
    "UnsortedSegmentMax": (1, 2),
    "UnsortedSegmentMin": (1, 2),
    "UnsortedSegmentProd": (1, 2),
}
#: Ops of whose results the number of rows depends on the values of their inputs.
_BY_VALUE = frozenset({"Where", "DynamicPartition", "Unique", "UniqueV2", "NonMaxSuppressionV3"})
#: The input that an op has the number of its rows from, if it is one of several; -1 for none.
_ROWS_OF = {
    **dict.fromkeys(("GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd"), 1),
    **dict.fromkeys(("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub"), 0),
    **dict.fromkeys(("ScatterNd", "UnsortedSegmentSum"), -1),
}
#: Ops that put elements at places of a tensor; and which of their inputs are the places.
PLACING = {"ScatterNd": 0, "TensorScatterAdd": 1, "TensorScatterSub": 1, "TensorScatterUpdate": 1}
#: Axes that a tensor may have whose rank is not known.
_LARGEST_RANK = 8


def batch_axis(tensor: Tensor, depends: Dependence) -> int | None:
    """The axis along which a tensor holds the examples of a batch; None if it has none."""
    if _has_no_examples(tensor, depends):
        return None
    if id(tensor) in depends.rows:
        return 0
    if id(tensor) not in depends.axes:
        _find_axis(tensor, depends)
    return depends.axes[id(tensor)][1]


def _find_axis(tensor: Tensor, depends: Dependence) -> None:
    """Finds a tensor's axis after those that it is computed from, on no stack: a graph is deep."""
    waiting, expanded = [tensor], set()
    while waiting:
        now = waiting[-1]
        if id(now) not in expanded:
            expanded.add(id(now))
            waiting += [x for x in now.op.inputs if _has_open_axis(x, depends)]
            continue
        waiting.pop()
        if id(now) not in depends.axes:
            # The tensor is kept, too: another one could be given its `id` otherwise.
            depends.axes[id(now)] = (now, _axis_of(now, depends))


def _has_no_examples(tensor: Tensor, depends: Dependence) -> bool:
    return tensor.shape.rank == 0 or id(tensor) in depends.reduced or not depends(tensor)


def _has_open_axis(tensor: Tensor, depends: Dependence) -> bool:
    known = id(tensor) in depends.axes or id(tensor) in depends.rows
    return not known and not _has_no_examples(tensor, depends)


def _axis_of(tensor: Tensor, depends: Dependence) -> int | None:
    op = tensor.op
    if op.type in ELEMENTWISE:
        return _aligned_axis(op, tensor, depends)
    if op.type in REDUCING | CHOOSING:
        return _axis_after_reduction(op, depends)
    if op.type == "Pack":
        inner = batch_axis(op.inputs[0], depends)
        return None if inner is None else inner + (op.get_attr("axis") <= inner)
    if op.type == "ConcatV2":
        result = [batch_axis(x, depends) for x in op.inputs[:-1]]
        return next((axis for axis in result if axis is not None), None)
    if op.type in ("Shape", "ShapeN") or is_drawn(op, depends):
        return None
    if op.type == "Transpose":
        order, axis = constant_of(op.inputs[1]), batch_axis(op.inputs[0], depends)
        return axis if order is None or axis is None else [int(i) for i in order].index(axis)
    if op.type == "MatMul" and any(contracted(op, depends)):
        return None
    if op.type == "Einsum":
        axes = einsum_axes(op, depends)
        return 0 if axes is None else axes[0]
    if is_by_class(op, depends):
        return None
    if op.type in ("TensorScatterAdd", "TensorScatterSub"):
        return batch_axis(op.inputs[0], depends)
    if op.type in PLACING and not depends(op.inputs[PLACING[op.type]]):
        return next((0 for x in op.inputs if batch_axis(x, depends) is not None), None)
    if op.type == "IdentityN":
        return batch_axis(op.inputs[tensor.value_index], depends)
    if op.type in ("Reshape", "Squeeze", "ExpandDims", "StridedSlice", "Slice"):
        return None if batch_axis(op.inputs[0], depends) is None else 0
    return None if _is_of_statistics(op, depends) else 0


def _is_of_statistics(op: Operation, depends: Dependence) -> bool:
    """Whether an op computes with matrices that hold no examples, such as a covariance."""
    own = [x for x in op.inputs if depends(x)]
    without = all(x.dtype.is_floating and batch_axis(x, depends) is None for x in own)
    return op.type in OF_MATRICES and bool(own) and without


def _aligned_axis(op: Operation, tensor: Tensor, depends: Dependence) -> int | None:
    """The axis after shapes have been broadcast from the right."""
    for each in op.inputs:
        axis = batch_axis(each, depends)
        if axis is not None:
            rank, own = tensor.shape.rank, each.shape.rank
            return axis if rank is None or own is None else axis + rank - own
    return None


def _axis_after_reduction(op: Operation, depends: Dependence) -> int | None:
    axis, axes = batch_axis(op.inputs[0], depends), reduced_axes(op)
    if axis is None or axis in axes:
        return None
    return axis if op.get_attr("keep_dims") else axis - sum(each < axis for each in axes)


def reduces_batch(op: Operation, depends: Dependence) -> bool:
    """Whether an op reduces its input along the axis of the examples."""
    source = op.inputs[0]
    axis = batch_axis(source, depends)
    return axis is not None and axis in reduced_axes(op)


def reduced_axes(op: Operation) -> list[int]:
    """The axes that an op reduces; all of them if they are not known."""
    rank = op.inputs[0].shape.rank
    if rank is None and op.inputs[1].op.type == "Range":  # As after a squeeze without an axis.
        return list(range(_LARGEST_RANK))
    rank = rank or 0
    axes = constant_of(op.inputs[1])
    if axes is not None:
        return [int(axis) % max(rank, 1) for axis in axes.reshape([-1])]
    widened = _widened_axes(op.inputs[1])
    return list(range(rank)) if widened is None else widened


def _widened_axes(axes: Tensor) -> list[int] | None:
    """The axes along which the gradient of a tensor that was broadcast is summed.

    An axis of open length is taken not to be one: it would have to be of length 1.
    """
    if axes.op.type != "BroadcastGradientArgs":
        return None
    shapes = [constant_value_as_shape(each) for each in axes.op.inputs]
    if any(shape.rank is None for shape in shapes):
        return None
    own = shapes[axes.value_index]
    new = max(shape.rank for shape in shapes) - own.rank
    return [*range(new), *(new + axis for axis, size in enumerate(own) if size == 1)]


def is_drawn(op: Operation, depends: Dependence) -> bool:
    """Whether an op draws random numbers, and not for each example."""
    own = [x for x in op.inputs if depends(x)]
    return "Random" in op.type and all(is_drawn(x.op, depends) for x in own)


def contracted(op: Operation, depends: Dependence) -> list[bool]:
    """For each factor of a product, whether the axis that is summed over holds the examples."""
    summed = (int(not op.get_attr("transpose_a")), int(op.get_attr("transpose_b")))
    return [batch_axis(x, depends) == axis for x, axis in zip(op.inputs, summed, strict=True)]


def einsum_axes(op: Operation, depends: Dependence) -> tuple[int | None, bool] | None:
    """The axis along which an Einsum's result holds the examples, and whether all factors do.

    Returns:
        None if the equation does not show it.
    """
    equation = op.get_attr("equation").decode()
    factors, _, result = equation.partition("->")
    if "." in equation:
        return None
    own = [each for each in zip(factors.split(","), op.inputs, strict=True) if depends(each[1])]
    axes = [(term, batch_axis(each, depends)) for term, each in own]
    letters = {term[axis] for term, axis in axes if axis is not None}
    if len(letters) != 1:
        return None
    axis = result.find(letters.pop())
    return (None if axis < 0 else axis), all(axis is not None for _, axis in axes)


def is_sum_by_class(op: Operation, depends: Dependence) -> bool:
    """Whether an op adds rows up by classes, whose number does not depend on the batch."""
    if op.type not in _SUMS_BY_CLASS or not is_by_class(op, depends):
        return False
    return _is_known(op.inputs[_SUMS_BY_CLASS[op.type][1]], depends)


def is_by_class(op: Operation, depends: Dependence) -> bool:
    """Whether an op puts the examples' rows together by classes: its result has none of them."""
    places = _SUMS_BY_CLASS.get(op.type) or _CHOOSE_BY_CLASS.get(op.type)
    if places is None or (op.type == "DenseBincount" and op.inputs[0].shape.rank != 1):
        return False  # Or it counts each example's numbers, as `CategoryEncoding` does.
    classes, size = (op.inputs[place] for place in places)
    if batch_axis(classes, depends) != 0 or _has_positions(classes):
        return False
    return op.type in ("Bincount", "DenseBincount") or _is_known(size, depends)


def _is_known(size: Tensor, depends: Dependence) -> bool:
    return not depends(size) or _is_bound(size)


def _is_bound(size: Tensor) -> bool:
    """Whether a number is the same constant at least and at most, as in `tf.math.bincount`."""
    if size.op.type != "Minimum":
        return False
    for constant, other in (size.op.inputs, reversed(size.op.inputs)):
        at_most = tf.get_static_value(constant)
        if at_most is not None and other.op.type == "Maximum":
            return any(tf.get_static_value(x) == at_most for x in other.op.inputs)
    return False


def _has_positions(classes: Tensor) -> bool:
    """Whether integers are computed from a range: these are the examples' places in the batch."""
    waiting, seen = [classes], set()
    while waiting:
        tensor = waiting.pop()
        if tensor.op.type == "Range":
            return True
        if id(tensor) not in seen and tensor.dtype.is_integer:
            seen.add(id(tensor))
            waiting.extend(tensor.op.inputs)
    return False


def holds_chosen(tensor: Tensor, depends: Dependence) -> bool:
    """Whether the rows of a tensor were chosen by values of the examples, as by `boolean_mask`.

    The flat values of ragged batches, of which each example has any number, count as chosen.

    A replica then has another share of the rows than it has of the examples. If the answer is
    yes for rows that were chosen and put back, counting them gives the share of the examples.
    """
    seen: set[int] = set()
    waiting = [tensor]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or batch_axis(each, depends) is None:
            continue
        seen.add(id(each))
        if each.op.type in _BY_VALUE or id(each) in depends.chosen:
            return True
        place = _ROWS_OF.get(each.op.type)
        inputs = list(each.op.inputs)
        waiting.extend(inputs if place is None else inputs[place : place + 1] if place >= 0 else [])
    return False
