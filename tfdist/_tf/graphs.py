"""Private TensorFlow symbols around the graphs that run, checked on TensorFlow 2.21."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from tfdist import types
from tfdist.types import ConcreteFunction, FuncGraph, Operation

__all__ = [
    "FlatFunction",
    "Function",
    "body_of",
    "called_in_line",
    "flat_call",
    "partitioned_graphs",
]

#: From flat tensors to flat tensors.
FlatFunction: TypeAlias = Callable[[Sequence[Any]], list[Any]]


def flat_call(concrete: ConcreteFunction) -> FlatFunction:
    """A traced function without the matching of arguments, which takes 15 us for each tensor.

    No tape records it.

    Args:
        concrete: the result of `get_concrete_function` for specs of tensors.
    """
    call, captured = concrete.inference_fn.call_flat, list(concrete.captured_inputs)

    def run(tensors: Sequence[Any]) -> list[Any]:
        return list(call(*tensors, *captured) or [])

    run.concrete = concrete  # type: ignore[attr-defined]  # It owns the graph.
    return run


@contextlib.contextmanager
def partitioned_graphs() -> Iterator[list[Any]]:
    """Collects the graphs of functions that run in the block for the first time.

    Yields:
        A list that is filled when the block ends: `GraphDef`s after placement and optimization,
        one for each function and device.
    """
    result: list[Any] = []
    context.enable_run_metadata()
    try:
        yield result
    finally:
        metadata = context.export_run_metadata()
        context.disable_run_metadata()
        for function in metadata.function_graphs:
            result.extend(function.partition_graphs)


def body_of(op: Operation) -> FuncGraph | None:
    """The graph of the function that an operation calls; None for other operations."""
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    function = op.graph._get_function(op.get_attr("f").name)
    return None if function is None else function.graph


def called_in_line(function: types.Function, *args: object, **kwargs: object) -> object:
    """Calls the Python function of a `tf.function`, by AutoGraph if that uses it, in this graph."""
    python = function.python_function
    if not function._autograph:
        return python(*args, **kwargs)
    options = function._experimental_autograph_options
    with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):
        return autograph_util.py_func_from_autograph(python, options)(*args, **kwargs)
