"""From a Keras model or a signature to a checked ONNX model, by tf2onnx.

Of tf2onnx's ways in, `from_function` is the one that works: `from_keras` asks for attributes that
Keras 3 no longer has (tensorflow-onnx#2329, #2348). An operation for which ONNX has no operator is
named with its layer, before the conversion or after it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Set
from typing import Any

import tensorflow as tf

from tfdist.exporting.onnx_models import package
from tfdist.exporting.subject import ExportError, Subject
from tfdist.types import Function, GraphDef, OnnxGraph, OnnxModel

__all__ = [
    "check",
    "convert",
    "convertible",
    "frozen",
    "joined",
    "layer_of",
    "strip_devices",
    "write",
]

_TOO_LARGE = ("2GB", "string too long", "exceeds maximum protobuf size")

_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
_TABLES = ("LookupTable", "HashTable", "MutableHashTable")
_PARSING = ("ParseExample", "ParseSingleExample", "DecodeCSV", "DecodeRaw", "DecodeJpeg")

_ADVICE = {
    "python": "It runs Python code, which no file can hold. Write it with TensorFlow or keras.ops.",
    "table": "It looks values up in a table. Do that to the data beforehand, and export the model "
    "that takes its result; or choose format='saved_model', which keeps tables.",
    "parsing": "It reads serialised examples. Export a signature that takes plain tensors.",
    "other": "Replace it by operations that ONNX has, or leave the layer out of the exported "
    "model; format='saved_model' keeps every operation.",
}

_COUNT = re.compile(r"_\d+$")


def convert(subject: Subject, opset: int) -> OnnxModel:
    """A subject as an ONNX `ModelProto`, accepted by the ONNX checker.

    Raises:
        ExportError: if an operation has no operator in ONNX, with its layer, or the result is not
            a valid model.
    """
    function = joined(convertible(subject))
    with _collected() as messages:
        try:
            model, _ = package("tf2onnx.convert").from_function(
                function,
                input_signature=subject.specs(),
                opset=opset,
                custom_op_handlers={"Erfc": (_erfc, [])},
            )
        except Exception as error:
            raise _failure(error, messages) from error
    schemas = {schema.name for schema in package("onnx").defs.get_all_schemas()}
    for node in _nodes_of(model.graph):
        if node.domain in ("", "ai.onnx") and node.op_type not in schemas:
            raise _refusal(node.op_type, layer_of(node.name, subject.layers))
    if messages:
        raise ExportError(f"tf2onnx could not convert the model: {messages[0]}")
    _tidy(model, list(function.get_concrete_function().structured_outputs))
    check(model)
    return model


def convertible(subject: Subject) -> Function:
    """The subject's function, if ONNX has an operator for each of its operations.

    Raises:
        ExportError: naming the first that can never be converted, and its layer.
    """
    traced = subject.trace()
    graph_def: GraphDef = traced.get_concrete_function().graph.as_graph_def()
    functions = {body.signature.name: body for body in graph_def.library.function}
    for node, caller in _all_nodes(graph_def.node, functions, ""):
        if _kind(node.op) != "other":
            raise _refusal(node.op, layer_of(caller or node.name, subject.layers))
    return traced


def check(model: OnnxModel) -> None:
    """Has the ONNX checker look at a model, shapes and types included.

    Raises:
        ExportError: if it finds something.
    """
    onnx = package("onnx")
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"The ONNX checker refuses the converted model: {error}") from error


def frozen(subject: Subject) -> tuple[GraphDef, dict[str, str]]:
    """The TensorFlow graph that tf2onnx converts, to compare its tensors with those of ONNX.

    Returns:
        A `GraphDef` without variables, and the name of the tensor of each output and input.
    """
    concrete = joined(subject.trace()).get_concrete_function()
    inputs = {each.name: t.name for each, t in zip(subject.inputs, concrete.inputs, strict=False)}
    outputs = {key: tensor.name for key, tensor in concrete.structured_outputs.items()}
    with _collected():
        graph_def = package("tf2onnx.tf_loader").from_function(
            concrete, list(inputs.values()), list(outputs.values())
        )
    return graph_def, {**outputs, **inputs}


def write(model: OnnxModel, path: str) -> None:
    """Writes a `ModelProto`."""
    package("onnx").save_model(model, path)


def joined(function: Function) -> Function:
    """A traced `tf.function`, without the devices that its layers were placed on.

    Args:
        function: a `tf.function` with an input signature and one trace, whose result is a dict.

    Returns:
        The same function if no operation names a device; else one that is made of its graph.
    """
    concrete = function.get_concrete_function()
    graph_def = concrete.graph.as_graph_def(add_shapes=True)
    if not strip_devices(graph_def):
        return function
    captured = {inside.name: outside for outside, inside in concrete.graph.captures}
    names = [tensor.name for tensor in concrete.inputs if tensor.name not in captured]
    fetched = {key: tensor.name for key, tensor in concrete.structured_outputs.items()}
    variables = concrete.variables

    def run(*tensors: Any) -> dict[str, Any]:
        for variable in variables:
            variable.read_value()  # makes it known to the converter as a variable of this graph
        graph = tf.compat.v1.get_default_graph()
        held = {name: graph.capture(tensor) for name, tensor in captured.items()}
        feeds = {**dict(zip(names, tensors, strict=True)), **held}
        out = tf.graph_util.import_graph_def(
            graph_def, input_map=feeds, return_elements=list(fetched.values()), name=""
        )
        return {key: tf.identity(value) for key, value in zip(fetched, out, strict=True)}

    again = tf.function(run, input_signature=function.input_signature, autograph=False)
    again.get_concrete_function()
    return again


def strip_devices(graph_def: GraphDef, kept: str = "") -> bool:
    """Takes the devices out of a `GraphDef`, its functions included; whether there were any.

    Args:
        graph_def: is changed.
        kept: a pattern of devices to leave.
    """
    stripped = False
    bodies = (function.node_def for function in graph_def.library.function)
    for node in itertools.chain(graph_def.node, *bodies):
        if node.device and not re.fullmatch(kept, node.device):
            stripped, node.device = True, ""
    return stripped


def layer_of(operation: str, layers: Set[str]) -> str:
    """The path of the layer in whose scope an operation was made.

    Keras opens a layer's name scope once to build it and once to call it, so TensorFlow counts the
    second: `functional_1/encoder_1/dense_2_1/MatMul` is of the layer `dense_2` in `encoder`.

    Args:
        operation: the operation's name.
        layers: the names of the model's layers; if there are none, scopes stand for layers.

    Returns:
        Such as `encoder/dense_2`; empty if no part of the name is a layer.
    """
    parts = operation.split("/")[:-1]
    if not layers:
        return "/".join(parts)
    result: list[str] = []
    for part in parts:
        counted = _COUNT.sub("", part)
        name = counted if counted in layers else part
        if name in layers and name not in result[-1:]:
            result.append(name)
    return "/".join(result)


def _erfc(context: Any, node: Any, name: str, args: object) -> None:
    """Erfc(x) = 1 - Erf(x).

    A workaround: TensorFlow's exact GELU uses Erfc since 2.21, which tf2onnx 1.17 does not know
    (tensorflow-onnx#2463).
    """
    del args
    output = node.output[0]
    shape, dtype = context.get_shape(output), context.get_dtype(output)
    context.remove_node(name)
    erf = context.make_node("Erf", [node.input[0]], dtypes=[dtype], shapes=[shape])
    kind = package("onnx").helper.tensor_dtype_to_np_dtype(dtype)
    one = context.make_const(f"{name}/one", kind.type(1))
    difference = [one.output[0], erf.output[0]]
    context.make_node(
        "Sub", difference, outputs=[output], name=name, dtypes=[dtype], shapes=[shape]
    )


@contextlib.contextmanager
def _collected() -> Iterator[list[str]]:
    """Collects the errors that tf2onnx reports, instead of letting it print."""
    messages: list[str] = []

    class _Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("tf2onnx"), _Collector(logging.ERROR)
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def _kind(operation: str) -> str:
    if operation in _PYTHON:
        return "python"
    if operation.startswith(_TABLES):
        return "table"
    return "parsing" if operation.startswith(_PARSING) else "other"


def _refusal(operation: str, layer: str) -> ExportError:
    where = f"of the layer {layer!r} " if layer else ""
    advice = _ADVICE[_kind(operation)]
    return ExportError(f"The operation {operation} {where}has no operator in ONNX. {advice}", layer)


def _all_nodes(
    nodes: Iterable[Any], functions: dict[str, Any], caller: str
) -> Iterator[tuple[Any, str]]:
    """The nodes of a graph and of the functions that it calls, each with the outermost caller."""
    for node in nodes:
        yield node, caller
        for attribute in node.attr.values():
            body = functions.get(attribute.func.name)
            if body is not None:
                inside = "" if node.op.endswith("PartitionedCall") else caller or node.name
                yield from _all_nodes(body.node_def, functions, inside)


def _nodes_of(graph: OnnxGraph) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _nodes_of(body)


def _failure(error: Exception, messages: list[str]) -> ExportError:
    text = str(error)
    if any(part in text for part in _TOO_LARGE):
        return ExportError(
            "The model has more than the 2 GB that one ONNX file and one graph of TensorFlow can "
            "hold. Choose format='saved_model', whose weights lie in files of their own."
        )
    detail = "; ".join(dict.fromkeys([*messages[:1], text.splitlines()[0] if text else ""]))
    return ExportError(f"tf2onnx could not convert the model ({type(error).__name__}): {detail}")


def _tidy(model: OnnxModel, order: list[str]) -> None:
    """Puts outputs in the model's order, and names open sizes after what they are."""
    there = sorted(model.graph.output, key=lambda output: order.index(output.name))
    del model.graph.output[:]
    model.graph.output.extend(there)
    model.graph.name = "tfdist"
    for value in model.graph.input:
        for number, size in enumerate(value.type.tensor_type.shape.dim):
            if size.dim_param:
                size.dim_param = "batch" if number == 0 else f"{value.name}_{number}"
    for value in (*model.graph.output, *model.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.ClearField("dim_param")
