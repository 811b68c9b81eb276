"""Finds the layer that computes something else in ONNX: the first whose result differs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.exporting import comparison, conversion
from tfdist.exporting.errors import ExportError
from tfdist.exporting.packages import package
from tfdist.exporting.places import layer_of
from tfdist.exporting.samples import Case
from tfdist.exporting.subject import Subject
from tfdist.types import Array, GraphDef, OnnxModel

__all__ = ["Culprit", "first_difference", "refuse_overflow"]

_LARGEST_HALF = 65504.0

_TENSOR = re.compile(r"[^:]+:\d+")

#: From ONNX's order of dimensions (channels first) to TensorFlow's, by rank.
_CHANNELS_LAST = {3: (0, 2, 1), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The first layer whose result differs.

    Attributes:
        layer: its path.
        tensor: the tensor that was compared.
        relative: the difference, divided by the tensor's largest magnitude.
    """

    layer: str
    tensor: str
    relative: float


def first_difference(
    subject: Subject, model: OnnxModel, case: Case, tolerance: float
) -> Culprit | None:
    """Looks for the first layer, in the order of computation, whose result differs.

    The tensors that an ONNX model and the graph it was converted from have in common keep their
    names. All of them are made outputs of the ONNX model, and of each layer the last is compared.

    Args:
        subject: the model that was converted.
        model: the ONNX model, a `ModelProto`.
        case: inputs for which an output differs.
        tolerance: the largest error of a tensor, relative to its largest magnitude.

    Returns:
        None if each tensor they have in common is the same.
    """
    graph_def, renamed = conversion.frozen(subject)
    shared = _shared(model, {node.name for node in graph_def.node}, renamed)
    actual = _in_onnx(model, list(shared), case)
    expected = _in_tensorflow(graph_def, list(shared.values()), subject, renamed, case)
    off = {}
    for name, there in shared.items():
        result = _difference(expected[there], actual[name])
        if result is not None:
            off[name] = result
    places = _places(model, subject.layers)
    last = {places[name] or name: name for name in off}  # in the order of computation
    order = list(off)
    for name in sorted(last.values(), key=order.index):
        if off[name] > tolerance:
            layer = places[name] or _origin(model, name, off, tolerance, places)
            return Culprit(layer, name, off[name])
    return None


def _shared(model: OnnxModel, operations: Set[str], renamed: dict[str, str]) -> dict[str, str]:
    """The tensors of an ONNX model that TensorFlow's graph has too, each with its name there."""
    shared = {}
    for node in model.graph.node:
        for name in node.output:
            there = renamed.get(name, name)
            if _TENSOR.fullmatch(there) and there.rpartition(":")[0] in operations:
                shared[name] = there
    return shared


def _places(model: OnnxModel, layers: Set[str]) -> dict[str, str]:
    """The layer of each tensor of an ONNX model, by its own name or its operation's."""
    return {
        name: layer_of(name, layers) or layer_of(node.name, layers)
        for node in model.graph.node
        for name in node.output
    }


def _origin(
    model: OnnxModel, tensor: str, off: dict[str, float], tolerance: float, places: dict[str, str]
) -> str:
    """The layer behind a tensor that no layer made, such as a sum of two.

    Walks back over tensors that have no counterpart up to those that are the same. The last layer
    on the way is meant, else the one that the walk ended in.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    waiting, between, ends = [tensor], [], []
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in makers:
            continue
        seen.add(name)
        if off.get(name, tolerance + 1) <= tolerance:
            ends.append(name)
            continue
        between.append(name)
        waiting.extend(makers[name].input)
    order = {name: number for number, name in enumerate(makers)}
    for group in (between, ends):
        named = [name for name in group if places[name]]
        if named:
            return places[max(named, key=order.__getitem__)]
    return ""


def refuse_overflow(model: OnnxModel, layers: Set[str], cases: Sequence[Case]) -> None:
    """Refuses a float32 model whose values are too large for float16 on the way.

    onnxruntime's CPU computes float16 models in float32 and would not notice what other devices
    turn into infinity.

    Args:
        model: the ONNX model in float32, a `ModelProto`.
        layers: the names of the model's layers.
        cases: inputs to look at.

    Raises:
        ExportError: naming the first layer with such a value.
    """
    places = _places(model, layers)
    for case in cases:
        values = _in_onnx(model, [name for name in places if name], case)
        for name, value in ((name, values[name]) for name in places if name):
            if value.dtype.kind != "f" or not value.size:
                continue
            largest = float(np.abs(value).max())
            if _LARGEST_HALF < largest < np.inf:
                layer = places[name]
                where = f" in the layer {layer!r}" if layer else ""
                raise ExportError(
                    f"A value of {largest:.3g}{where} is more than the {_LARGEST_HALF:g} that "
                    f"float16 can hold, with {case.title}. Nothing was written. Choose float32, or "
                    "scale the inputs or weights of the model down.",
                    layer,
                )


def _difference(expected: Array, actual: Array) -> float | None:
    """The relative difference, in whichever order of dimensions fits; None if none does.

    Only of numbers: tf2onnx writes some conditions as the opposite and its negation, and the first
    keeps the name.
    """
    if expected.dtype.kind != "f":
        return None
    result = []
    order = _CHANNELS_LAST.get(actual.ndim)
    for each in (actual, *([actual.transpose(order)] if order else ())):
        if each.shape == expected.shape:
            result.append(comparison.difference(expected, each)[1])
    return min(result, default=None)


def _in_onnx(model: OnnxModel, names: list[str], case: Case) -> dict[str, Any]:
    onnx = package("onnx")
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    there = {output.name for output in watched.graph.output}
    watched.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in there
    )
    return comparison.runner(comparison.session_of(watched))(case.inputs)


def _in_tensorflow(
    graph_def: GraphDef, names: list[str], subject: Subject, renamed: dict[str, str], case: Case
) -> dict[str, Any]:
    """Values of a frozen graph's tensors, in a graph of its own.

    Made into a function, its loops would clash with those of the first trace, of the same names.
    """
    feeds = {renamed[each.name]: case.inputs[each.name] for each in subject.inputs}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        values = session.run(list(dict.fromkeys(names)), feeds)
    return {name: np.asarray(v) for name, v in zip(dict.fromkeys(names), values, strict=True)}
