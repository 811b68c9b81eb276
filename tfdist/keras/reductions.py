"""Classifies how a loss of a traced step depends on its examples: as mean, sum, or otherwise.

Replicas average what they compute, weighted by examples. That is exact for a mean over examples,
and for a sum of such means. Other losses have to be brought into that form first:

* a sum over examples is divided by the replica's share of them;
* any other function of means and sums, such as a root of a mean or a ratio of two sums, needs the
  means and sums of the whole batch. With `y = f(a_1, a_2, ...)`, each `a_i` a mean or a sum over
  the examples, the gradient of the whole batch is `sum_i df/da_i * grad(a_i)`, with the partial
  derivatives at the values of the whole batch. They cost one all-reduce of the `a_i`.

The parts of a loss are read off the graph, from the loss back to the first reductions over the
batch axis.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfdist._tf.graphs import constant_of
from tfdist.comm.batch_dependence import Dependence, is_symbolic
from tfdist.keras.batch_axes import (
    ELEMENTWISE,
    OF_MATRICES,
    PLACING,
    REDUCING,
    batch_axis,
    contracted,
    einsum_axes,
    holds_chosen,
    is_drawn,
    is_sum_by_class,
    reduces_batch,
)
from tfdist.sharding.relayout import remembered
from tfdist.types import Operation, Tensor

__all__ = [
    "Leaf",
    "Reduction",
    "is_by_feature",
    "is_count",
    "leaf_of",
    "reduction_of",
]

#: Ops that move elements, and keep their number, or leave some out.
_MOVING = frozenset(
    {"Reshape", "Squeeze", "ExpandDims", "Pack", "ConcatV2", "StridedSlice", "Unpack"}
)
#: Ops whose results are functions of the same means and sums as their inputs, if of any.
_FOLLOWED = ELEMENTWISE | _MOVING | REDUCING | OF_MATRICES | {"L2Loss", *PLACING}
_DIVISIONS = frozenset({"RealDiv", "Div", "DivNoNan"})
#: Ops that are linear in all their inputs.
_SUMS = frozenset({"AddV2", "Add", "AddN", "Sub", "Identity", "Cast", "Neg"})
#: Ops that keep a sum over the examples one if only one of their inputs depends on these.
_SCALING = frozenset({"Mul", "Reshape", "Squeeze"})


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
    waiting = [(tensor, False)]
    while waiting:
        now, is_followed = waiting.pop()
        if is_followed:
            result.linear = result.linear and _is_linear(now.op, depends)
            if now.op not in result.between:
                result.between.append(now.op)
        elif id(now) not in seen:
            seen[id(now)] = now
            if not _is_end(now, result, depends, means):
                waiting.append((now, True))  # After its inputs.
                waiting += [(each, False) for each in reversed(now.op.inputs)]
    return result


def is_by_feature(tensor: Tensor, depends: Dependence, means: dict[int, Any]) -> bool:
    """Whether a tensor of rank 1 or more has reduced the batch, such as sums for each feature.

    For the arguments see `reduction_of`.
    """
    if not is_symbolic(tensor) or tensor.shape.rank == 0 or not depends(tensor):
        return False
    if batch_axis(tensor, depends) is not None:
        return False
    return not reduction_of(tensor, depends, means).unknown


def _is_end(tensor: Tensor, found: Reduction, depends: Dependence, means: dict[int, Any]) -> bool:
    """Whether a tensor is not followed to its inputs; adds it to what is found if so."""
    if not depends(tensor):
        if tensor.dtype.is_floating:
            found.shared.append(tensor)
        return True
    leaf = leaf_of(tensor, depends, means)
    if leaf is not None:
        found.leaves.append(leaf)
        return True
    op = tensor.op
    if (
        op.type not in _FOLLOWED
        or any(depends(x) and batch_axis(x, depends) is not None for x in op.inputs)
        or (op.type in PLACING and depends(op.inputs[PLACING[op.type]]))
    ):
        # Also a sum of what was divided by the number of examples in another way than a mean is.
        found.unknown.add(_hiding(op, depends))
        found.leaves.append(Leaf(tensor, is_sum=False))
        return True
    return False


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
    if op.type in REDUCING and reduces_batch(op, depends):
        source = op.inputs[0]
        if _are_distinct(source) or _are_beside_others(source, depends):
            return None
        divided = _times_divided(source, depends) + (op.type == "Mean")
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


def _adds_rows_up(op: Operation, depends: Dependence) -> bool:
    """Whether an op adds up products of the examples, or puts sums of them into classes."""
    if op.type == "MatMul":
        return contracted(op, depends) == [True, True]
    if op.type == "Einsum":
        axes = einsum_axes(op, depends)
        return axes is not None and axes[0] is None and axes[1]
    return is_sum_by_class(op, depends)


def _is_sum(tensor: Tensor, depends: Dependence, means: dict[int, Any]) -> bool:
    """Whether a tensor is a sum over the examples, or that times what is the same on replicas.

    So is a sum of several, to which Keras's regularizers add a zero.
    """
    waiting, seen = [tensor], set()
    while waiting:
        now = waiting.pop()
        if id(now) in seen:
            continue
        seen.add(id(now))
        leaf = leaf_of(now, depends, means)
        if leaf is not None:
            if not leaf.is_sum or _counts_examples(now.op, depends):
                return False
            continue
        own = [x for x in now.op.inputs if depends(x)]
        if now.op.type in _SUMS:
            others = [constant_of(x) for x in now.op.inputs if not depends(x)]
            if any(x is None or x.any() for x in others):
                return False
        elif now.op.type not in _SCALING or len(own) != 1:
            return False
        waiting += own
    return True


def _is_linear(op: Operation, depends: Dependence) -> bool:
    own = [depends(x) for x in op.inputs]
    if op.type in (*_MOVING, *REDUCING, *_SUMS, "StopGradient"):
        return own[0] or op.type in (*_SUMS, "Pack", "ConcatV2")
    if op.type in ("RealDiv", "Div", "DivNoNan"):
        return not own[1]
    if op.type in PLACING:
        return True
    return op.type == "Mul" and sum(own) == 1


def _times_divided(tensor: Tensor, depends: Dependence) -> float:
    """Counts the divisions of each example's value by the number of examples; NaN if not known.

    The sum of values that were divided once is a mean.
    """
    known: dict[int, float] = {}
    waiting = [tensor]
    while waiting:
        now = waiting[-1]
        inputs = _divided_inputs(now.op, depends) if depends(now) else []
        unknown = [x for x in inputs if id(x) not in known]
        if unknown:
            waiting += unknown
            continue
        times = [known[id(x)] for x in inputs]
        known[id(now)] = _divided_by_op(now.op, depends, times) if inputs else 0.0
        waiting.pop()
    return known[id(tensor)]


def _divided_inputs(op: Operation, depends: Dependence) -> list[Tensor]:
    """The inputs whose divisions count for an op's result."""
    if _divides_by_examples(op, depends):
        return [op.inputs[0]]
    if op.type in ELEMENTWISE:
        return list(op.inputs)
    # Layers divide nothing by the number of examples.
    passes = op.type in ("Reshape", "Squeeze", "ExpandDims", *REDUCING)
    return [op.inputs[0]] if passes else []


def _divides_by_examples(op: Operation, depends: Dependence) -> bool:
    return op.type in _DIVISIONS and _is_number_of_examples(op.inputs[1], depends)


def _divided_by_op(op: Operation, depends: Dependence, times: list[float]) -> float:
    if _divides_by_examples(op, depends):
        return times[0] + 1.0
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
