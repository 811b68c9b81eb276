"""Operations that ONNX has no operator for: found before and after the conversion, and named."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Set
from typing import Any

from tfdist.exporting.errors import ExportError
from tfdist.exporting.packages import package
from tfdist.exporting.places import layer_of
from tfdist.types import GraphDef, OnnxGraph, OnnxModel

__all__ = ["HANDLERS", "collected", "refuse_foreign", "refuse_leftovers"]

_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
_PARSING = ("ParseExample", "ParseSingleExample", "DecodeCSV", "DecodeRaw", "DecodeJpeg")

_ADVICE = {
    "python": "It runs Python code, which no file can hold. Write it with TensorFlow or keras.ops.",
    "table": "It looks values up in a table. Do that to the data beforehand, and export the model "
    "that takes its result; or choose format='saved_model', which keeps tables.",
    "parsing": "It reads serialised examples. Export a signature that takes plain tensors.",
    "other": "Replace it by operations that ONNX has, or leave the layer out of the exported "
    "model; format='saved_model' keeps every operation.",
}


def _erfc(context: Any, node: Any, name: str, args: object) -> None:
    """Erfc(x) = 1 - Erf(x).

    A workaround: TensorFlow's exact GELU uses Erfc since 2.21, which tf2onnx 1.17 does not know
    (tensorflow-onnx#2463).
    """
    del args
    output, shape, dtype = node.output[0], context.get_shape(node.output[0]), None
    dtype = context.get_dtype(output)
    context.remove_node(name)
    erf = context.make_node("Erf", [node.input[0]], dtypes=[dtype], shapes=[shape])
    kind = package("onnx").helper.tensor_dtype_to_np_dtype(dtype)
    one = context.make_const(f"{name}/one", kind.type(1))
    difference = [one.output[0], erf.output[0]]
    context.make_node(
        "Sub", difference, outputs=[output], name=name, dtypes=[dtype], shapes=[shape]
    )


#: Handlers for tf2onnx of operations that it does not know.
HANDLERS: dict[str, tuple[Any, list[Any]]] = {"Erfc": (_erfc, [])}


def refuse_foreign(graph_def: GraphDef, layers: Set[str]) -> None:
    """Refuses a graph with operations that can never be converted, before it is tried.

    Args:
        graph_def: a `GraphDef`.
        layers: the names of the model's layers.

    Raises:
        ExportError: naming the first, its layer and what to do.
    """
    functions = {body.signature.name: body for body in graph_def.library.function}
    for node, caller in _all_nodes(graph_def.node, functions, ""):
        kind = _kind(node.op)
        if kind != "other":
            raise _refusal(node.op, layer_of(caller or node.name, layers), kind)


def refuse_leftovers(model: OnnxModel, layers: Set[str]) -> None:
    """Refuses an ONNX model that still holds operations of TensorFlow.

    Args:
        model: a `ModelProto`.
        layers: the names of the model's layers.

    Raises:
        ExportError: naming the first, its layer and what to do.
    """
    schemas = {schema.name for schema in package("onnx").defs.get_all_schemas()}
    for node in _nodes_of(model.graph):
        if node.domain in ("", "ai.onnx") and node.op_type not in schemas:
            raise _refusal(node.op_type, layer_of(node.name, layers), _kind(node.op_type))


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """Collects the errors that tf2onnx reports, instead of letting it print."""
    messages: list[str] = []

    class _Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                messages.append(record.getMessage())

    logger, handler = logging.getLogger("tf2onnx"), _Collector()
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
    if operation.startswith(("LookupTable", "HashTable", "MutableHashTable")):
        return "table"
    return "parsing" if operation.startswith(_PARSING) else "other"


def _refusal(operation: str, layer: str, kind: str) -> ExportError:
    where = f"of the layer {layer!r} " if layer else ""
    return ExportError(
        f"The operation {operation} {where}has no operator in ONNX. {_ADVICE[kind]}", layer
    )


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
