"""Classifies how a loss of a traced step depends on its examples: as mean, sum, or otherwise.

Replicas average what they compute, weighted by examples. That is exact for a mean over examples,
and for a sum of such means. Other losses have to be brought into that form first:

* a sum over examples is divided by the replica's share of them;
* any other function of means and sums, such as a root of a mean or a ratio of two sums, needs the
  means and sums of the whole batch. With `y = f(a_1, a_2, ...)`, each `a_i` a mean or a sum over
  the examples, the gradient of the whole batch is `sum_i df/da_i * grad(a_i)`, with the partial
  derivatives at the values of the whole batch. They cost one all-reduce of the `a_i`.

The parts of a loss are read off the graph, from the loss back to the first reductions over the
batch axis. A tensor of rank 1 or more from an op that is not known here is taken to hold one row
for each example, as the outputs of a model do.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfdist._tf.graphs import constant_of, constant_value_as_shape
from tfdist.comm.batch_dependence import Dependence
from tfdist.sharding.relayout import remembered
from tfdist.types import Operation, Tensor

__all__ = [
    "CHOOSING",
    "ELEMENTWISE",
    "Leaf",
    "Reduction",
    "batch_axis",
    "holds_chosen",
    "is_by_class",
    "is_count",
    "leaf_of",
    "reduced_axes",
    "reduces_batch",
    "reduction_of",
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
#: Ops that move elements, and keep their number, or leave some out.
_MOVING = frozenset(
    {"Reshape", "Squeeze", "ExpandDims", "Pack", "ConcatV2", "StridedSlice", "Unpack"}
)
_REDUCING = frozenset({"Sum", "Mean"})
#: Ops on matrices, which have a row for each example only if a matrix that they are given has.
_OF_MATRICES = frozenset(
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
#: Ops whose results are functions of the same means and sums as their inputs, if of any.
_FOLLOWED = ELEMENTWISE | _MOVING | _REDUCING | _OF_MATRICES | {"L2Loss"}
_DIVISIONS = frozenset({"RealDiv", "Div", "DivNoNan"})
#: Ops that are linear in all their inputs.
_SUMS = frozenset({"AddV2", "Add", "AddN", "Sub", "Identity", "Cast", "Neg"})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A mean or a sum over the examples of a batch.

    Attributes:
        tensor: of any shape, without a batch axis.
        is_sum: whether it is a sum; else a mean.
        chosen: of a mean over rows that were chosen by their values, the tensor of these rows, and
            its axis. Replicas have chosen other shares of them than they have of the examples.
        is_drawn: whether it is random numbers, of which one process draws as many, and no mean.
        is_all: whether it is a boolean that holds of all examples, and not of any.
    """

    tensor: Tensor
    is_sum: bool
    chosen: tuple[Any, int] | None = None
    is_drawn: bool = False
    is_all: bool = False

    @property
    def is_discrete(self) -> bool:
        """Whether it is a whole number or a boolean, of which a replica has no share."""
        return self.tensor.dtype.is_integer or self.tensor.dtype == tf.bool

    def count(self) -> Tensor:
        """The number of rows that this replica has chosen, in the type of the tensor."""
        assert self.chosen is not None
        rows, axis = self.chosen
        return tf.cast(tf.shape(rows)[axis], self.tensor.dtype)


@dataclasses.dataclass
class Reduction:
    """The origin of a tensor without a batch axis.

    Attributes:
        leaves: the means and sums over examples that it is a function of.
        shared: the other tensors that it is a function of, such as weights: the same on all
            replicas.
        linear: whether it is a linear function of these, but for what does not depend on the batch.
        unknown: types of the ops, if any, that hide how they reduce the batch.
        between: the ops from the leaves to the tensor, each after its inputs.
    """

    leaves: list[Leaf] = dataclasses.field(default_factory=list)
    shared: list[Any] = dataclasses.field(default_factory=list)
    linear: bool = True
    unknown: set[str] = dataclasses.field(default_factory=set)
    between: list[Any] = dataclasses.field(default_factory=list)

    @property
    def is_mean(self) -> bool:
        """Whether an average over the replicas is right as it is, as far as is known."""
        return self.linear and not any(map(_is_apart, self.leaves))


def _is_apart(leaf: Leaf) -> bool:
    return leaf.is_sum or bool(leaf.chosen) or leaf.is_drawn or leaf.tensor.dtype == tf.bool


def reduction_of(tensor: Tensor, depends: Dependence, means: dict[int, Any]) -> Reduction:
    """Finds out how a tensor without a batch axis depends on the examples.

    Args:
        tensor: a symbolic tensor.
        depends: returns whether a tensor depends on the batch.
        means: tensors, by `id`, that are known to be means over the examples.
    """
    result = Reduction()
    seen: dict[int, Any] = {}
    _visit(tensor, result, depends, means, seen)
    return result


def _visit(
    tensor: Tensor,
    found: Reduction,
    depends: Dependence,
    means: dict[int, Any],
    seen: dict[int, Any],
) -> None:
    """Goes from a tensor to the leaves, depth first."""
    if id(tensor) in seen:
        return
    seen[id(tensor)] = tensor
    if not depends(tensor):
        if tensor.dtype.is_floating:
            found.shared.append(tensor)
        return
    leaf = leaf_of(tensor, depends, means)
    if leaf is not None:
        found.leaves.append(leaf)
        return
    op = tensor.op
    if op.type not in _FOLLOWED or any(
        depends(x) and batch_axis(x, depends) is not None for x in op.inputs
    ):
        # Also a sum of what was divided by the number of examples in another way than a mean is.
        found.unknown.add(_hiding(op, depends))
        found.leaves.append(Leaf(tensor, is_sum=False))
        return
    for each in op.inputs:
        _visit(each, found, depends, means, seen)
    found.linear = found.linear and _is_linear(op, depends)
    if op not in found.between:
        found.between.append(op)


def _hiding(op: Operation, depends: Dependence) -> str:
    """The type of the op behind an op's examples that hides how these are reduced."""
    found = op
    while found.type in _FOLLOWED:
        rows = (x for x in found.inputs if depends(x) and batch_axis(x, depends) is not None)
        source = next(rows, None)
        if source is None or source.op.type == "Placeholder":
            return str(op.type)
        found = source.op
    return str(found.type)


def leaf_of(tensor: Tensor, depends: Dependence, means: dict[int, Any]) -> Leaf | None:
    """The mean or sum over examples that a tensor is; None if it is none, or not by itself.

    Args:
        tensor: a symbolic tensor.
        depends: whether a tensor depends on the batch.
        means: tensors, by `id`, that are known to be means over the examples.
    """
    op = tensor.op
    if id(tensor) in means:
        return Leaf(tensor, is_sum=False)
    if is_drawn(op, depends):
        return Leaf(tensor, is_sum=False, is_drawn=True)
    part = remembered(tensor)
    if part is not None:  # gathered of the parts of a layer that is divided, each of which is one
        leaf = leaf_of(part.value, depends, means)
        return None if leaf is None else dataclasses.replace(leaf, tensor=tensor)
    if op.type == "L2Loss" and batch_axis(op.inputs[0], depends) is not None:
        return Leaf(tensor, is_sum=True)
    if _counts_examples(op, depends):
        return None if _are_distinct(_counted(op)) else Leaf(tensor, is_sum=True)
    if op.type in _REDUCING and reduces_batch(op, depends):
        source = op.inputs[0]
        if _are_distinct(source) or _are_beside_others(source, depends):
            return None
        divided = _times_divided(source, depends, {}) + (op.type == "Mean")
        if op.type == "Mean" and divided == 1 and holds_chosen(source, depends):
            return Leaf(tensor, is_sum=False, chosen=(source, batch_axis(source, depends) or 0))
        return Leaf(tensor, is_sum=divided == 0) if divided in (0, 1) else None
    if _adds_rows_up(op, depends):
        return Leaf(tensor, is_sum=True)
    if op.type in ("Any", "All") and reduces_batch(op, depends):
        return Leaf(tensor, is_sum=False, is_all=op.type == "All")
    if op.type in _DIVISIONS and _is_number_of_examples(op.inputs[1], depends):
        return Leaf(tensor, is_sum=False) if _is_sum(op.inputs[0], depends, means) else None
    return None


def is_drawn(op: Operation, depends: Dependence) -> bool:
    """Whether an op draws random numbers, and not for each example."""
    own = [x for x in op.inputs if depends(x)]
    return "Random" in op.type and all(is_drawn(x.op, depends) for x in own)


def _adds_rows_up(op: Operation, depends: Dependence) -> bool:
    """Whether an op adds up products of the examples, or puts sums of them into classes."""
    if op.type == "MatMul":
        return _contracted(op, depends) == [True, True]
    if op.type == "Einsum":
        axes = _einsum_axes(op, depends)
        return axes is not None and axes[0] is None and axes[1]
    return _is_sum_by_class(op, depends)


def _is_sum_by_class(op: Operation, depends: Dependence) -> bool:
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


def _einsum_axes(op: Operation, depends: Dependence) -> tuple[int | None, bool] | None:
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


def _is_sum(tensor: Tensor, depends: Dependence, means: dict[int, Any]) -> bool:
    """Whether a tensor is a sum over the examples, or that times what is the same on replicas.

    So is a sum of several, to which Keras's regularizers add a zero.
    """
    leaf = leaf_of(tensor, depends, means)
    own = [x for x in tensor.op.inputs if depends(x)]
    if leaf is None and tensor.op.type in _SUMS:
        others = [constant_of(x) for x in tensor.op.inputs if not depends(x)]
        zeros = all(x is not None and not x.any() for x in others)
        return zeros and all(_is_sum(x, depends, means) for x in own)
    if leaf is not None or len(own) != 1:
        return leaf is not None and leaf.is_sum and not _counts_examples(tensor.op, depends)
    passes = tensor.op.type in ("Mul", "Identity", "Cast", "Reshape", "Squeeze")
    return passes and _is_sum(own[0], depends, means)


def _is_linear(op: Operation, depends: Dependence) -> bool:
    own = [depends(x) for x in op.inputs]
    if op.type in (*_MOVING, *_REDUCING, *_SUMS, "StopGradient"):
        return own[0] or op.type in (*_SUMS, "Pack", "ConcatV2")
    if op.type in ("RealDiv", "Div", "DivNoNan"):
        return not own[1]
    return op.type == "Mul" and sum(own) == 1


def _times_divided(tensor: Tensor, depends: Dependence, known: dict[int, float]) -> float:
    """Counts the divisions of each example's value by the number of examples; NaN if not known.

    The sum of values that were divided once is a mean.
    """
    if id(tensor) not in known:
        known[id(tensor)] = _divided_by_op(tensor.op, depends, known) if depends(tensor) else 0.0
    return known[id(tensor)]


def _divided_by_op(op: Operation, depends: Dependence, known: dict[int, float]) -> float:
    if op.type in _DIVISIONS and _is_number_of_examples(op.inputs[1], depends):
        return _times_divided(op.inputs[0], depends, known) + 1.0
    if op.type not in (*ELEMENTWISE, "Reshape", "Squeeze", "ExpandDims", *_REDUCING):
        return 0.0  # As layers do.
    inputs = op.inputs if op.type in ELEMENTWISE else op.inputs[:1]
    times = [_times_divided(x, depends, known) for x in inputs]
    if not any(times):
        return 0.0
    if op.type == "Mul":
        return sum(times)
    if op.type in _DIVISIONS:
        return times[0] - times[1]
    passes = op.type in (*_SUMS, "StopGradient") or op.type not in ELEMENTWISE
    return times[0] if passes and len(set(times)) == 1 else math.nan


def _is_number_of_examples(tensor: Tensor, depends: Dependence) -> bool:
    """Whether a tensor is the number of examples, or that many times a constant."""
    op = tensor.op
    if _counts_examples(op, depends):
        return not holds_chosen(_counted(op), depends)
    own = [x for x in op.inputs if depends(x)]
    passes = op.type in ("Cast", "Identity", "Reshape", "ExpandDims", "Mul")
    return passes and len(own) == 1 and _is_number_of_examples(own[0], depends)


def _counts_examples(op: Operation, depends: Dependence) -> bool:
    """Whether an op gives the number of examples, or of elements of them."""
    if op.type == "Size":
        return batch_axis(op.inputs[0], depends) is not None
    if op.type == "Prod" and op.inputs[0].op.type == "Shape":
        return batch_axis(op.inputs[0].op.inputs[0], depends) is not None
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    start = constant_of(op.inputs[1])
    single = op.get_attr("shrink_axis_mask") == 1
    axis = batch_axis(op.inputs[0].op.inputs[0], depends)
    return single and axis is not None and start is not None and int(start[0]) == axis


def is_count(leaf: Tensor) -> bool:
    """Whether a leaf is a number of examples, or of their elements, and no sum of values."""
    return leaf.op.type in ("Size", "Prod", "StridedSlice")


def _counted(op: Operation) -> Tensor:
    """The tensor whose examples an op counts."""
    return op.inputs[0] if op.type == "Size" else op.inputs[0].op.inputs[0]


def _are_distinct(rows: Tensor) -> bool:
    """Whether rows are the different values of a batch, of which replicas have some in common."""
    waiting, seen = [rows], set()
    while waiting:
        tensor = waiting.pop()
        if tensor.op.type.startswith("Unique"):
            if tensor.value_index != 1:  # The second result has a number for each example.
                return True
        elif id(tensor) not in seen and tensor.op.type in ELEMENTWISE | _MOVING:
            waiting.extend(tensor.op.inputs)
        seen.add(id(tensor))
    return False


def _are_beside_others(rows: Tensor, depends: Dependence) -> bool:
    """Whether rows of the batch stand before or after others, which each replica has as well."""
    waiting, seen = [rows], set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen or not depends(tensor):
            continue
        seen.add(id(tensor))
        if tensor.op.type == "ConcatV2":
            *parts, at = tensor.op.inputs
            along = constant_of(at) == batch_axis(tensor, depends)
            if along and any(batch_axis(x, depends) is None for x in parts):
                return True
        elif tensor.op.type in ELEMENTWISE:
            waiting.extend(tensor.op.inputs)
    return False


def _contracted(op: Operation, depends: Dependence) -> list[bool]:
    """For each factor of a product, whether the axis that is summed over holds the examples."""
    summed = (int(not op.get_attr("transpose_a")), int(op.get_attr("transpose_b")))
    return [batch_axis(x, depends) == axis for x, axis in zip(op.inputs, summed, strict=True)]


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


#: Axes that a tensor may have whose rank is not known.
_LARGEST_RANK = 8


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


def batch_axis(tensor: Tensor, depends: Dependence) -> int | None:
    """The axis along which a tensor holds the examples of a batch; None if it has none."""
    if tensor.shape.rank == 0 or id(tensor) in depends.reduced or not depends(tensor):
        return None
    if id(tensor) in depends.rows:
        return 0
    if id(tensor) not in depends.axes:
        # The tensor is kept, too: another one could be given its `id` otherwise.
        depends.axes[id(tensor)] = (tensor, _axis_of(tensor, depends))
    return depends.axes[id(tensor)][1]


def _axis_of(tensor: Tensor, depends: Dependence) -> int | None:
    op = tensor.op
    if op.type in ELEMENTWISE:
        return _aligned_axis(op, tensor, depends)
    if op.type in _REDUCING | CHOOSING:
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
    if op.type == "MatMul" and any(_contracted(op, depends)):
        return None
    if op.type == "Einsum":
        axes = _einsum_axes(op, depends)
        return 0 if axes is None else axes[0]
    if is_by_class(op, depends):
        return None
    if op.type in ("TensorScatterAdd", "TensorScatterSub"):
        return batch_axis(op.inputs[0], depends)
    if op.type == "IdentityN":
        return batch_axis(op.inputs[tensor.value_index], depends)
    if op.type in ("Reshape", "Squeeze", "ExpandDims", "StridedSlice", "Slice"):
        return None if batch_axis(op.inputs[0], depends) is None else 0
    return None if _is_of_statistics(op, depends) else 0


def _is_of_statistics(op: Operation, depends: Dependence) -> bool:
    """Whether an op computes with matrices that hold no examples, such as a covariance."""
    own = [x for x in op.inputs if depends(x)]
    without = all(x.dtype.is_floating and batch_axis(x, depends) is None for x in own)
    return op.type in _OF_MATRICES and bool(own) and without


#: Reductions that are neither means nor sums.
CHOOSING = frozenset({"Max", "Min", "Prod", "All", "Any"})


#: Ops of whose results the number of rows depends on the values of their inputs.
_BY_VALUE = frozenset({"Where", "DynamicPartition", "Unique", "UniqueV2", "NonMaxSuppressionV3"})
#: The input that an op has the number of its rows from, if it is one of several; -1 for none.
_ROWS_OF = {
    **dict.fromkeys(("GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd"), 1),
    **dict.fromkeys(("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub"), 0),
    **dict.fromkeys(("ScatterNd", "UnsortedSegmentSum"), -1),
}


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
