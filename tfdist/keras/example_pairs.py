"""Losses in which the examples of a batch meet: contrastive ones, and those with statistics.

Each replica has its own examples only, so a loss of all pairs of a batch has fewer pairs there than
in one process. That is read off the graph: a tensor that has the examples along two axes is about
pairs of them, and an example meets all others in what is reduced from them, such as the batch's
mean. An example meets its neighbours if the batch is put into another order and meets itself, as
in MixUp, if it is cut into groups, or if examples are chosen by their places. The axes are followed
through the ops that are known here; if an op hides them, nothing is claimed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tfdist._tf.graphs import branches_of, constant_of
from tfdist.comm.batch_dependence import Dependence
from tfdist.keras.batch_axes import ELEMENTWISE, is_by_class, reduced_axes
from tfdist.keras.example_order import Orders
from tfdist.types import FuncGraph, Operation, Tensor

__all__ = [
    "NO_EXAMPLES",
    "ROWS",
    "Examples",
    "Meeting",
    "examples_of",
    "meeting_of",
    "place_of",
    "statistic_in",
]

#: The axes along which a tensor holds the examples of a batch.
Axes: TypeAlias = frozenset[int]
#: Of a tensor that does not hold one row, or one column, for each example.
NO_EXAMPLES: Axes = frozenset()
#: Of a tensor that holds one row for each example, as the outputs of a model do.
ROWS: Axes = frozenset({0})
_REDUCING = frozenset(
    {"Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin", "EuclideanNorm"}
)


class Examples(NamedTuple):
    """The places of the examples of a batch in a tensor.

    Attributes:
        axes: the axes along which it holds them.
        in_order: whether they are in the order of the batch.
        reduced: whether it holds no example by itself, but is computed from all of them.
    """

    axes: Axes = NO_EXAMPLES
    in_order: bool = True
    reduced: bool = False


def examples_of(
    tensor: Tensor, depends: Dependence, known: Mapping[int, Examples] = MappingProxyType({})
) -> Examples:
    """The places of the examples in a tensor; for the arguments see `meeting_of`."""
    search = _Search(depends, known)
    search.run(tensor, lambda op, own, from_reduced: False)
    return search.found(tensor)


class Meeting(NamedTuple):
    """A place in which examples of a batch meet.

    Attributes:
        where: its op, by name and type.
        by_place: whether they are neighbours in the batch, or are chosen by their places in it.
        chooses: whether some are chosen by their places.
        hidden: whether a Python function is called there, which only may relate them.
    """

    where: str
    by_place: bool = False
    chooses: bool = False
    hidden: bool = False


def meeting_of(
    target: Tensor,
    depends: Dependence,
    known: Mapping[int, Examples],
    *,
    statistics: bool = False,
    places: bool = True,
    counts: bool = False,
) -> Meeting | None:
    """Finds where examples meet on the way to a tensor.

    Args:
        target: a loss, symbolic.
        depends: whether a tensor depends on the batch.
        known: how some tensors hold examples, by `id`; the search goes no further than these.
        statistics: whether an example also meets the others in a number that is reduced from all of
            them, such as the batch's mean, and in a Python function.
        places: whether examples also meet by their places in the batch.
        counts: whether their number is such a number too, when it is computed with.

    Returns:
        The first op found, or None.
    """
    judge = _Judge(depends, statistics, places, counts)
    search = _Search(depends, known, counts)
    op = search.run(target, functools.partial(judge.meets, search))
    if op is None:
        return None
    by_place = places and search.orders.meet(op)
    chooses = places and search.orders.choose(op)
    return Meeting(place_of(op), by_place, chooses, op.type in _PYTHON)


def statistic_in(
    value: Tensor, depends: Dependence, known: Mapping[int, Examples]
) -> Meeting | None:
    """Finds a statistic of the batch in a value: in its rows, or as all of it.

    Args:
        value: an argument of a layer or a loss, symbolic.
        depends: see `meeting_of`.
        known: see `meeting_of`.
    """
    found = meeting_of(value, depends, known, statistics=True, places=False, counts=True)
    if found is None and examples_of(value, depends, known).reduced:
        return Meeting(place_of(value.op))
    return found


def place_of(op: Operation) -> str:
    """The name and type of an op, for a message."""
    return f"{_REPLICA.sub('', op.name)!r}, {op.type}"


class _Judge(NamedTuple):
    """Decides at which ops examples meet; for the attributes see `meeting_of`."""

    depends: Dependence
    statistics: bool
    places: bool
    counts: bool

    def meets(self, search: _Search, op: Operation, own: Axes, from_reduced: bool) -> bool:
        """Whether examples meet at an op that a search has come to; see `_Search.run`."""
        if len(own) > 1 or (self.places and search.orders.meet(op)):
            return True
        if not self.statistics:
            return False
        if op.type in _PYTHON or _runs_along(op, search.axes) or self._inside(search, op):
            return True
        mixes = op.type in _BROADCASTING | _CONTRACTING | _BESIDE
        return bool(own) and from_reduced and mixes

    def _inside(self, search: _Search, op: Operation) -> bool:
        """Whether examples meet in a branch of a condition, or in a loop."""
        graphs = branches_of(op)
        loops = op.type in _LOOPS
        for graph in graphs:
            known = _given(search, graph, op.inputs if loops else op.inputs[1:])
            while True:  # Each round may pass examples on to another variable of a loop.
                inner = _Search(self.depends, known, self.counts)
                for result in filter(self.depends, graph.outputs):
                    if inner.run(result, functools.partial(self.meets, inner)) is not None:
                        return True
                before, known = known, _carried(inner, graph, known) if loops else known
                if before == known:
                    break
        if not loops or len(graphs) < 2:
            return False
        condition, body = graphs
        return _ends_by_examples(condition, _given(search, condition, op.inputs)) or any(
            result.dtype != tf.variant and _is_of_items(result, known) for result in body.outputs
        )


def _given(search: _Search, graph: FuncGraph, values: Sequence[Tensor]) -> dict[int, Examples]:
    """The places of the examples in the arguments of a branch or of a loop."""
    return {id(x): search.found(value) for x, value in zip(graph.inputs, values, strict=True)}


def _carried(inner: _Search, graph: FuncGraph, known: dict[int, Examples]) -> dict[int, Examples]:
    """The same after a round of a loop, which has a result for each of its arguments."""
    if len(graph.outputs) != len(graph.inputs):
        return known
    again = dict(known)
    for argument, result in zip(graph.inputs, graph.outputs, strict=True):
        before, after = known[id(argument)], inner.found(result)
        reduced = before.reduced or after.reduced
        in_order = before.in_order and after.in_order
        again[id(argument)] = Examples(before.axes | after.axes, in_order, reduced)
    return again


def _ends_by_examples(condition: FuncGraph, known: Mapping[int, Examples]) -> bool:
    """Whether a loop goes on until all examples are near enough to something.

    One that ends when a flag of each example is set goes on for the others alone.
    """
    for op in condition.get_operations():
        if op.type not in _REDUCING or not op.inputs:
            continue
        sources = _flags_behind(op.inputs[0]) if op.type in ("All", "Any") else list(op.inputs[:1])
        if any(_is_of_rows(each, known) for each in sources):
            return True
    return False


def _flags_behind(tensor: Tensor) -> list[Tensor]:
    """The numbers that flags are computed from; none if they are flags of the loop's own."""
    waiting, numbers = [tensor], []
    while waiting:
        each = waiting.pop()
        if each.dtype != tf.bool:
            numbers.append(each)
        else:
            waiting.extend(each.op.inputs)
    return numbers


def _is_of_rows(tensor: Tensor, known: Mapping[int, Examples]) -> bool:
    """Whether a tensor is computed from rows of examples among known ones."""
    return any(known[key].axes for key in _sources(tensor) if key in known)


def _is_of_items(tensor: Tensor, known: Mapping[int, Examples]) -> bool:
    """Whether a tensor is computed from single examples of a list of them."""
    return any(
        op.type == "TensorListGetItem" and known.get(id(op.inputs[0]), Examples()).axes
        for op in _ops_behind(tensor)
    )


def _sources(tensor: Tensor) -> set[int]:
    ops = _ops_behind(tensor)
    return {id(tensor)} | {id(x) for op in ops for x in op.inputs if op.type not in _SIZES}


def _ops_behind(tensor: Tensor) -> list[Operation]:
    """The ops that a tensor is computed by, without those that only a shape takes part in."""
    waiting, seen = [tensor.op], {}
    while waiting:
        op = waiting.pop()
        if op.name not in seen:
            seen[op.name] = op
            waiting.extend(x.op for x in op.inputs if op.type not in _SIZES)
    return list(seen.values())


class _Search:
    """Finds how the tensors that a tensor is computed from hold the examples.

    Args:
        depends: see `meeting_of`.
        known: see `meeting_of`.
        counts: see `meeting_of`.
    """

    def __init__(
        self, depends: Dependence, known: Mapping[int, Examples], counts: bool = False
    ) -> None:
        self._depends, self._counts = depends, counts
        self._axes = {key: each.axes for key, each in known.items()}
        self._reduced = {key for key, each in known.items() if each.reduced}
        joined = [key for key, each in known.items() if not each.in_order]
        combining = _BROADCASTING | _CONTRACTING | _BESIDE_EACH_OTHER
        self.orders = Orders(self.axes, depends, combining, joined)

    def axes(self, tensor: Tensor) -> Axes:
        """The axes along which a tensor that was searched holds examples."""
        return self._axes.get(id(tensor), NO_EXAMPLES)

    def found(self, tensor: Tensor) -> Examples:
        """The places of the examples in a tensor that was searched."""
        in_order, reduced = self.orders.is_natural(tensor), id(tensor) in self._reduced
        return Examples(self.axes(tensor), in_order, reduced)

    def run(
        self, target: Tensor, ends: Callable[[Operation, Axes, bool], bool]
    ) -> Operation | None:
        """Looks at all tensors that one is computed from, each after its inputs.

        Args:
            target: the tensor.
            ends: whether to stop at an op: it gets the op, the axes of its result, and whether an
                input is reduced from all examples.

        Returns:
            The op at which the search has stopped, or None.
        """
        waiting = [target]
        while waiting:
            tensor = waiting[-1]
            if id(tensor) in self._axes:
                waiting.pop()
                continue
            op = tensor.op
            inputs = () if op.type in _SIZES else op.inputs  # A shape holds none of the values.
            unknown = [x for x in inputs if id(x) not in self._axes and self._depends(x)]
            if unknown:
                waiting.extend(unknown)
                continue
            self._axes[id(tensor)] = own = _axes_of(tensor, self.axes, self._depends)
            from_reduced = any(id(x) in self._reduced for x in _values_of(op))
            if ends(op, own, from_reduced):
                return op
            self.orders.follow(tensor, own)
            reduces = _is_reduction(tensor, self.axes, self._depends) or self._is_count(tensor)
            if not own and (from_reduced or reduces):
                self._reduced.add(id(tensor))
            waiting.pop()
        return None

    def _is_count(self, tensor: Tensor) -> bool:
        """Whether a tensor is the number of examples as a number to compute with, not a size."""
        if not self._counts or tensor.op.type != "Cast" or not tensor.dtype.is_floating:
            return False
        [source] = tensor.op.inputs
        while source.op.type in _OF_SIZES:
            source = source.op.inputs[0]
        return source.op.type in _SIZES and self._depends(tensor)


def _values_of(op: Operation) -> list[Tensor]:
    """The inputs that the result's elements are made of, without those that give its size.

    A size may be the length of the longest row.
    """
    lengths = _LENGTHS.get(op.type, ())
    return [x for i, x in enumerate(op.inputs) if i not in lengths]


def _runs_along(op: Operation, axes: Callable[[Tensor], Axes]) -> bool:
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


def _is_reduction(tensor: Tensor, axes: Callable[[Tensor], Axes], depends: Dependence) -> bool:
    """Whether a tensor that has nothing by example is computed from all examples."""
    op, types = tensor.op, {*_REDUCING, *_CONTRACTING, *_INTO_GIVEN, "L2Loss"}
    reduces = op.type in types or _counts_repeats(tensor) or is_by_class(op, depends)
    return reduces and any(axes(x) for x in op.inputs)


def _counts_repeats(tensor: Tensor) -> bool:
    """Whether a tensor has how often each value occurs in a batch."""
    return tensor.op.type.startswith("UniqueWithCounts") and tensor.value_index == 2


def _axes_of(tensor: Tensor, axes: Callable[[Tensor], Axes], depends: Dependence) -> Axes:
    op, rank = tensor.op, tensor.shape.rank
    if tensor.dtype == tf.variant:  # A list of rows, as `tf.map_fn` makes.
        made = op.type == "TensorListFromTensor"
        rows = any(0 in axes(x) for x in op.inputs if made or x.dtype == tf.variant)
        return ROWS if rows else NO_EXAMPLES
    apart = op.type in _SIZES or is_by_class(op, depends) or _counts_repeats(tensor)
    if not rank or apart or not depends(tensor):
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


#: The beginning of the names of ops of another replica in this process.
_REPLICA = re.compile(r"^replica_\d+/")
_LOOPS = frozenset({"While", "StatelessWhile"})
#: Ops that call a function of Python.
_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
#: Ops that relate an example's values in one input to those in another.
_BESIDE_EACH_OTHER = frozenset(
    {
        *("Pack", "ConcatV2", "SparseSoftmaxCrossEntropyWithLogits"),
        *("SoftmaxCrossEntropyWithLogits", "InTopKV2"),
    }
)
#: Ops that put values of several inputs into one row, or choose by one what is done to others.
_BESIDE = frozenset(
    {"GatherV2", "GatherNd", "ConcatV2", "If", "StatelessIf", "Case", "StatelessCase"}
)
_CONTRACTING = frozenset({"MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"})
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
_SIZES = frozenset({"Shape", "ShapeN", "Size"})
#: Ops that make another size of the sizes that come first among their inputs.
_OF_SIZES = frozenset({"StridedSlice", "Prod", "Mul", "Cast", "GatherV2", "Identity", "Reshape"})
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
_BROADCASTING = (ELEMENTWISE - {"Select"}) | {"FloorMod", "LogSoftmax", "Softmax"}
