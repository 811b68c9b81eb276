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
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import tensorflow as tf

from tfdist._tf.graphs import branches_of
from tfdist.comm.batch_dependence import Dependence
from tfdist.keras.batch_axes import batch_axis, holds_chosen
from tfdist.keras.example_axes import (
    BESIDE,
    BESIDE_EACH_OTHER,
    BROADCASTING,
    CONTRACTING,
    MOVING_PLACES,
    NO_EXAMPLES,
    OF_SIZES,
    REDUCING,
    ROWS,
    SIZES,
    Axes,
    axes_of,
    is_reduction,
    runs_along,
    values_of,
)
from tfdist.keras.example_order import Orders, measured_by
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
    by_place = places and (search.orders.meet(op) or search.weighs_places(op))
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
        if len(own) > 1 or (self.places and (search.orders.meet(op) or search.weighs_places(op))):
            return True
        if not self.statistics:
            return False
        if op.type in _PYTHON or runs_along(op, search.axes) or self._inside(search, op):
            return True
        mixes = op.type in BROADCASTING | CONTRACTING | BESIDE
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
        if op.type not in REDUCING or not op.inputs:
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
    return {id(tensor)} | {id(x) for op in ops for x in op.inputs if op.type not in SIZES}


def _ops_behind(tensor: Tensor) -> list[Operation]:
    """The ops that a tensor is computed by, without those that only a shape takes part in."""
    waiting, seen = [tensor.op], {}
    while waiting:
        op = waiting.pop()
        if op.name not in seen:
            seen[op.name] = op
            waiting.extend(x.op for x in op.inputs if op.type not in SIZES)
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
        self._places: set[int] = set()
        joined = [key for key, each in known.items() if not each.in_order]
        combining = BROADCASTING | CONTRACTING | BESIDE_EACH_OTHER
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
            inputs = () if op.type in SIZES else op.inputs  # A shape holds none of the values.
            unknown = [x for x in inputs if id(x) not in self._axes and self._depends(x)]
            if unknown:
                waiting.extend(unknown)
                continue
            self._axes[id(tensor)] = own = axes_of(tensor, self.axes, self._depends)
            from_reduced = any(id(x) in self._reduced for x in values_of(op))
            if ends(op, own, from_reduced):
                return op
            self.orders.follow(tensor, own)
            if self._is_of_places(tensor):
                self._places.add(id(tensor))
            reduces = is_reduction(tensor, self.axes, self._depends) or self._is_count(tensor)
            if not own and (from_reduced or reduces):
                self._reduced.add(id(tensor))
            waiting.pop()
        return None

    def weighs_places(self, op: Operation) -> bool:
        """Whether an op computes with examples and with their places in the batch.

        Integers are left out: they are indices, which give the number of each example's row.
        """
        if op.type not in BROADCASTING | CONTRACTING or not op.outputs[0].dtype.is_floating:
            return False
        of_places = [id(x) in self._places for x in op.inputs]
        others = (x for x, placed in zip(op.inputs, of_places, strict=True) if not placed)
        return any(of_places) and any(self.axes(x) for x in others)

    def _is_of_places(self, tensor: Tensor) -> bool:
        """Whether a tensor is computed from the places of the examples, `arange(batch_size)`."""
        op = tensor.op
        if op.type == "Range":
            measured = measured_by(op.inputs[1])
            return measured is not None and self._counts_rows(op.inputs[1], measured)
        if op.type not in BROADCASTING | MOVING_PLACES:
            return False
        return any(id(x) in self._places for x in op.inputs)

    def _counts_rows(self, length: Tensor, measured: Tensor) -> bool:
        """Whether a length of a tensor is that of its rows, of which each example has one."""
        depends = self._depends
        has_row = batch_axis(measured, depends) == 0 and not holds_chosen(measured, depends)
        return has_row and depends(length)

    def _is_count(self, tensor: Tensor) -> bool:
        """Whether a tensor is the number of examples as a number to compute with, not a size."""
        if not self._counts or tensor.op.type != "Cast" or not tensor.dtype.is_floating:
            return False
        [source] = tensor.op.inputs
        while source.op.type in OF_SIZES:
            source = source.op.inputs[0]
        return source.op.type in SIZES and self._depends(tensor)


#: The beginning of the names of ops of another replica in this process.
_REPLICA = re.compile(r"^replica_\d+/")
_LOOPS = frozenset({"While", "StatelessWhile"})
#: Ops that call a function of Python.
_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
