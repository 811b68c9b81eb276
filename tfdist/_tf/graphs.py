"""Private TensorFlow symbols around the graphs that run, checked on TensorFlow 2.21."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeAlias, cast

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.eager.polymorphic_function.tf_method_target import TfMethodTarget
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph
from tensorflow.python.framework.tensor_util import constant_value_as_shape
from tensorflow.python.ops import custom_gradient as custom_gradients
from tensorflow.python.ops.parallel_for import control_flow_ops as parallel_for
from tensorflow.python.saved_model.load import _WrapperFunction as LoadedFunction

from tfdist import types
from tfdist.types import ConcreteFunction, FuncGraph, Operation, Tensor, Variable

__all__ = [
    "FlatFunction",
    "Function",
    "LoadedFunction",
    "TfMethodTarget",
    "assigned_variables",
    "at_call",
    "body_of",
    "branches_of",
    "called_in_line",
    "constant_of",
    "constant_value_as_shape",
    "custom_gradients",
    "flat_call",
    "fresh_zeros",
    "made_for_dataset",
    "on_one_replica",
    "ordered_apart",
    "parallel_for",
    "parameters_of",
    "partitioned_graphs",
    "run_again",
]

#: Arguments that `tf.raw_ops` calls `axis` if it does not call them so.
_AXES = ("reduction_indices", "squeeze_dims", "split_dim", "dim")
#: Other arguments of ops that it calls otherwise.
_RENAMED = {"Select": {"t": "x", "e": "y"}, "Where": {"input": "condition"}}

#: The attributes of an op that name the functions of its branches.
_BRANCHES = {
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
    **dict.fromkeys(("While", "StatelessWhile"), ("cond", "body")),
}

#: From flat tensors to flat tensors.
FlatFunction: TypeAlias = Callable[[Sequence[Any]], list[Any]]


def fresh_zeros(variable: Variable) -> Tensor:
    """Zeros in the shape of a variable, made each time that they are asked for.

    Those of `tf.zeros` become a constant of the graph: as much memory as the variable, which a
    server of TensorFlow keeps when the function is gone.
    """
    return tf.raw_ops.Empty(shape=variable.shape, dtype=variable.dtype, init=True)


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
def ordered_apart() -> Iterator[None]:
    """Lets the checks and prints of one replica wait for each other, but not for those of others.

    A function's ops that act on no resource, such as `Assert`, `PrintV2` and `EagerPyFunc`, run in
    the order in which they were traced, and replicas are traced one after the other. So replica 1
    would begin by waiting for all checks of replica 0. If one of those comes after an exchange, in
    which replica 1 takes part, both wait for ever. TensorFlow's own strategies trace replicas in
    turns, from exchange to exchange.
    """
    graph = tf.compat.v1.get_default_graph()
    manager = graph.experimental_acd_manager
    if manager is None:
        yield
        return
    before = len(graph.get_operations())
    yield
    last = None
    for op in graph.get_operations()[before:]:
        if _is_in_order_of_trace(op):
            if last is not None:
                op._add_control_input(last)
            manager.run_independently(op)
            last = op


def _is_in_order_of_trace(op: Operation) -> bool:
    return bool(
        op._control_flow_context is None
        and auto_control_deps.op_is_stateful(op)
        and op.type not in auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS
        and not any(auto_control_deps._get_resource_inputs(op))
    )


#: The functions that run in place of those that `Strategy.run` was given, and their contexts.
_ON_ONE_REPLICA: weakref.WeakKeyDictionary[Any, tuple[Any, list[Any]]] = weakref.WeakKeyDictionary()


def on_one_replica(
    fn: Callable[..., Any], around: Callable[[], contextlib.AbstractContextManager[None]]
) -> Callable[..., Any]:
    """A function for `Strategy.run`, whose checks and prints are `ordered_apart`.

    TensorFlow makes a `tf.function` the outer one, in which it runs the replicas. So does this.

    Args:
        fn: the function of a replica.
        around: a context in which each replica is to run it.
    """
    if not isinstance(fn, Function):
        return _apart(fn, ag_ctx.control_status_ctx(), around)
    if fn not in _ON_ONE_REPLICA:
        status = ag_ctx.Status.ENABLED if fn._autograph else ag_ctx.Status.DISABLED
        latest: list[Any] = []  # A later call may trace it anew, in a context of its own.
        run = _apart(fn.python_function, ag_ctx.ControlStatusCtx(status), lambda: latest[0]())
        # Marked, so that AutoGraph does not wrap it in an ordinary function.
        marked = autograph.autograph_artifact(fn._clone(python_function=run))
        _ON_ONE_REPLICA[fn] = marked, latest
    function, latest = _ON_ONE_REPLICA[fn]
    latest[:] = [around]
    return cast("Callable[..., Any]", function)


def _apart(
    fn: Callable[..., Any],
    status: object,
    around: Callable[[], contextlib.AbstractContextManager[None]],
) -> Callable[..., Any]:
    converted = autograph.tf_convert(fn, status, convert_by_default=False)

    @functools.wraps(fn)
    @autograph.do_not_convert  # type: ignore[untyped-decorator]
    def run(*args: object, **kwargs: object) -> object:
        with around(), ordered_apart():
            return converted(*args, **kwargs)

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
    return None if function is None else _graph_of(function, op)


def branches_of(op: Operation) -> list[FuncGraph]:
    """The graphs of a condition's branches or of a loop; none for other operations."""
    named = [op.get_attr(name) for name in _BRANCHES.get(op.type, ())]
    flat = [each for one in named for each in (one if isinstance(one, list) else [one])]
    functions = [op.graph._get_function(each.name) for each in flat]
    return [_graph_of(function, op) for function in functions if function is not None]


#: Ops that change a variable.
_ASSIGNING = re.compile("Assign(Add|Sub|)VariableOp|Resource(Scatter|Strided|Apply|SparseApply).*")


def assigned_variables(graph: FuncGraph) -> list[str]:
    """The names of the variables that a graph assigns, also in the functions that it calls."""
    names = []
    for op in graph.get_operations():
        inner = [body_of(op), *branches_of(op)]
        names += [name for each in inner if each is not None for name in assigned_variables(each)]
        if _ASSIGNING.fullmatch(op.type):
            given = [outer for outer, own in graph.captures if own is op.inputs[0]]
            known = [v.name for v in graph.variables if any(v.handle is each for each in given)]
            names.append(known[0] if known else op.inputs[0].op.name)
    return names


def at_call(key: Hashable, value: Callable[[], Tensor], spec: tf.TensorSpec) -> Tensor | None:
    """The tensor that `value` returns when the function that is being traced is called.

    Args:
        key: values of one key are one tensor in a function.
        value: called eagerly, at each call.
        spec: the type and the shape of what it returns.

    Returns:
        The tensor; None if no function is being traced.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    capture = getattr(graph, "capture_call_time_value", None)
    return None if capture is None else capture(value, spec, key)


def made_for_dataset() -> bool:
    """Whether a value of `at_call` is asked for by a data set that is being made.

    A data set keeps what its functions capture. TensorFlow marks them in their definitions only,
    which a value does not see, so this looks at the modules that are calling.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("tensorflow.python.data."):
            return True
        frame = frame.f_back
    return False


def _graph_of(function: Any, caller: Operation) -> FuncGraph:
    """A function's graph; made from its definition if it is a `Defun`, such as CTC loss uses."""
    graph: FuncGraph | None = getattr(function, "graph", None)
    if graph is not None:
        return graph
    with caller.graph.as_default():  # It knows the functions that this one calls.
        return function_def_to_graph(function.definition)


def called_in_line(function: types.Function, *args: object, **kwargs: object) -> object:
    """Calls the Python function of a `tf.function`, by AutoGraph if that uses it, in this graph."""
    python = function.python_function
    if not function._autograph:
        return python(*args, **kwargs)
    options = function._experimental_autograph_options
    with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):
        return autograph_util.py_func_from_autograph(python, options)(*args, **kwargs)


def constant_of(tensor: Tensor) -> Any:
    """The value of a tensor that is computed from constants alone; None of another one.

    `tf.get_static_value` knows few ops: a sum of constants is none that it knows. Each op runs
    once, however many others take its result.
    """
    known: dict[int, Any] = {}
    waiting = [tensor]
    while waiting:
        now = waiting[-1]
        value = tf.get_static_value(now)
        inputs = [] if value is not None or now.op.op_def.is_stateful else list(now.op.inputs)
        if any(known.get(id(each), each) is None for each in inputs):
            inputs = []  # One is not constant.
        unknown = next((each for each in inputs if id(each) not in known), None)
        if unknown is not None:
            waiting.append(unknown)
            continue
        if inputs:
            with tf.init_scope():
                results = run_again(now.op, [known[id(each)] for each in inputs])
            value = results[now.value_index].numpy()
        known[id(waiting.pop())] = value
    return known[id(tensor)]


def parameters_of(op_def: Any) -> dict[str, str]:
    """The names that `tf.raw_ops` gives to the inputs and attributes of an op."""
    known = inspect.signature(getattr(tf.raw_ops, op_def.name)).parameters
    renamed = {name: "axis" for name in _AXES if name not in known} | _RENAMED.get(op_def.name, {})
    return {
        each.name: renamed.get(each.name, each.name) for each in (*op_def.input_arg, *op_def.attr)
    }


def run_again(op: Operation, inputs: list[Any]) -> list[Any]:
    """Runs an op of the same type and attributes on other inputs."""
    supply = iter(inputs)
    run = getattr(tf.raw_ops, op.type)
    arguments: dict[str, Any] = {}
    renamed = parameters_of(op.op_def)
    for argument in op.op_def.input_arg:
        several = None
        if argument.number_attr:
            several = [next(supply) for _ in range(op.get_attr(argument.number_attr))]
        elif argument.type_list_attr:
            several = [next(supply) for _ in op.get_attr(argument.type_list_attr)]
        arguments[renamed[argument.name]] = next(supply) if several is None else several
    attributes = {renamed[each.name]: each.name for each in op.op_def.attr}
    for name in inspect.signature(run).parameters:
        if name not in arguments and name != "name":
            arguments[name] = op.get_attr(attributes[name])
    results = run(**arguments)
    return list(results) if isinstance(results, (list, tuple)) else [results]
