"""Exchanges that are made only if something reads their results.

TensorFlow runs every collective of a function, also one whose result nothing reads. So while a
replica's function is traced, another tensor of the shape stands for a gathered one. When all of it
is there, those that an output or an operation with effects depends on are replaced by gathers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._tf.distribute import feed_from
from tfdist.types import Graph, Operation, Structure, Tensor
from tfdist.utils.thread_state import Current

__all__ = ["exchanging_what_is_read", "if_read"]


class _Exchange(NamedTuple):
    """An exchange that has not been made yet.

    Attributes:
        stand_in: the tensor that stands for its result.
        shape: makes the shape of that.
        make: makes it.
    """

    stand_in: Tensor
    shape: Callable[[], Tensor]
    make: Callable[[], Tensor]


class _Function(NamedTuple):
    """A replica's function that is being traced.

    Attributes:
        graph: its graph.
        exchanges: those that wait, by the operations of their stand-ins.
    """

    graph: Graph
    exchanges: dict[Any, _Exchange]


#: Operations whose results have the shapes of their inputs.
_SAME_SHAPE = frozenset({"Identity", "IdentityN", "Cast", "EnsureShape", "StopGradient", "Tanh"})

_traced: Current[_Function | None] = Current(None)


def if_read(part: Tensor, dimension: int, count: int, make: Callable[[], Tensor]) -> Tensor:
    """The parts of all processes, gathered if anything reads them.

    The tensor that stands for them depends on the same ones. It has NaN for the others' parts, so
    that it cannot be mistaken for them.

    Args:
        part: this process's part, of a floating type.
        dimension: the divided dimension.
        count: the number of parts.
        make: gathers them. It is called at once if there is no function to be traced, and in a
            branch or a loop of one.
    """
    function = _traced.value
    if function is None or tf.executing_eagerly() or _graph() is not function.graph:
        return make()
    others = [tf.fill(tf.shape(part), tf.constant(math.nan, part.dtype))] * (count - 1)
    stand_in: Tensor = tf.concat([part, *others], dimension)
    sizes = part.shape.as_list()
    sizes[dimension] *= count
    stand_in.set_shape(sizes)

    def shape() -> Tensor:
        times = [count if each == dimension else 1 for each in range(len(sizes))]
        whole: Tensor = tf.shape(part) * tf.constant(times)
        return whole

    function.exchanges[stand_in.op] = _Exchange(stand_in, shape, make)
    return stand_in


def exchanging_what_is_read(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A replica's function, of whose exchanges by `if_read` those are made that are read."""

    @functools.wraps(fn)
    def run(*args: object, **kwargs: object) -> Any:
        if tf.executing_eagerly():
            return fn(*args, **kwargs)
        function = _Function(_graph(), {})
        with _traced.set(function):
            results = fn(*args, **kwargs)
        _shape_from_parts(function)
        for exchange in _read(function, results):
            feed_from(exchange.stand_in, exchange.make())
        return results

    return run


def _graph() -> Graph:
    graph: Graph = tf.compat.v1.get_default_graph()
    return graph


def _shape_from_parts(function: _Function) -> None:
    """Lets nothing read a stand-in for its shape only."""
    for op in function.graph.get_operations():
        if op.type == "Shape":
            exchange = function.exchanges.get(_origin(op.inputs[0]).op)
            if exchange is not None:
                feed_from(op.outputs[0], tf.cast(exchange.shape(), op.outputs[0].dtype))


def _origin(tensor: Tensor) -> Tensor:
    """The first of the tensors of one shape that a tensor is computed from."""
    while tensor.op.type in _SAME_SHAPE and len(tensor.op.inputs):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _read(function: _Function, results: Structure) -> list[_Exchange]:
    """The exchanges that results, or operations with effects, depend on."""
    leaves = tf.nest.flatten(results, expand_composites=True)
    operations: list[Operation] = function.graph.get_operations()
    waiting: list[Any] = [each for each in operations if each.op_def.is_stateful]
    waiting += [each.op for each in leaves if getattr(each, "graph", None) is function.graph]
    needed: set[Any] = set()
    while waiting:
        operation = waiting.pop()
        if operation in needed:
            continue
        needed.add(operation)
        waiting += [each.op for each in operation.inputs] + list(operation.control_inputs)
    return [each for op, each in function.exchanges.items() if op in needed]
