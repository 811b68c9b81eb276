"""Does a written model compute what the model computes, and if not, which layer differs first?"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.exporting import conversion
from tfdist.exporting.conversion import layer_of
from tfdist.exporting.examples import Case
from tfdist.exporting.onnx_models import package, runner
from tfdist.exporting.subject import Arrays, ExportError, Subject, first_line
from tfdist.types import Array, GraphDef, OnnxModel

__all__ = ["Comparison", "Difference", "compared", "first_difference", "refuse_overflow"]

_LARGEST_HALF = 65504.0

_TENSOR = re.compile(r"[^:]+:\d+")

#: From ONNX's order of dimensions (channels first) to TensorFlow's, by rank.
_CHANNELS_LAST = {3: (0, 2, 1), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The error of one output in one case.

    Attributes:
        output: its name.
        case: the inputs that were tried.
        absolute: the largest difference of an element; infinite if shapes, NaNs or infinities
            differ.
        relative: the same, divided by the largest magnitude of the output.
    """

    output: str
    case: str
    absolute: float
    relative: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All outputs in all cases.

    Attributes:
        tolerance: the bound on `Difference.relative`.
        differences: one for each output and case.
        layer: the first layer that differs, if it was looked for and found.
    """

    tolerance: float
    differences: tuple[Difference, ...]
    layer: str = ""

    @property
    def worst(self) -> Difference:
        """The largest difference, relative to its output."""
        return max(self.differences, key=lambda each: each.relative)

    @property
    def ok(self) -> bool:
        """Whether all are within the tolerance."""
        return self.worst.relative <= self.tolerance

    def worst_of(self, output: str) -> Difference:
        """The largest difference of one output."""
        mine = (each for each in self.differences if each.output == output)
        return max(mine, key=lambda each: each.relative)


def compared(
    run: Callable[[Arrays], Arrays], cases: Sequence[Case], tolerance: float
) -> Comparison:
    """Runs the written model, a function of arrays by name, on each case.

    Raises:
        ExportError: if it does not run.
    """
    result: list[Difference] = []
    for case in cases:
        try:
            actual = run(case.inputs)
        except Exception as error:
            raise ExportError(
                f"What was written does not run with {case.title}, which the model accepts: "
                f"{first_line(error)}"
            ) from error
        for name, expected in case.expected.items():
            if name not in actual:
                raise ExportError(
                    f"The model has an output {name!r}, and what was written only "
                    f"{', '.join(map(repr, actual))}. It is of another model."
                )
            result.append(Difference(name, case.title, *_difference(expected, actual[name])))
    return Comparison(tolerance, tuple(result))


def _difference(expected: Array, actual: Array) -> tuple[float, float]:
    """The largest difference of two arrays: absolute, and relative to the first's magnitude."""
    if expected.shape != actual.shape:
        return np.inf, np.inf
    if expected.dtype.kind in "OSU":
        same = expected.astype("U") == actual.astype("U")
        return (0.0, 0.0) if same.all() else (np.inf, np.inf)
    one, other = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(one)
    alike = (one == other) | (np.isnan(one) & np.isnan(other))
    if not (alike | (finite & np.isfinite(other))).all():
        return np.inf, np.inf
    if not finite.any():
        return 0.0, 0.0
    absolute = float(np.abs(one[finite] - other[finite]).max())
    scale = float(np.abs(one[finite]).max())
    return absolute, absolute / scale if scale else absolute


def first_difference(subject: Subject, model: OnnxModel, case: Case, tolerance: float) -> str:
    """Looks for the first layer, in the order of computation, whose result differs.

    The tensors that an ONNX model and the graph it was converted from have in common keep their
    names. All of them are made outputs of the ONNX model, and of each layer the last is compared.

    Returns:
        The layer's path; empty if each tensor they have in common is the same.
    """
    graph_def, renamed = conversion.frozen(subject)
    operations = {node.name for node in graph_def.node}
    shared = {}
    for node in model.graph.node:
        for name in node.output:
            there = renamed.get(name, name)
            if _TENSOR.fullmatch(there) and there.rpartition(":")[0] in operations:
                shared[name] = there
    actual = _in_onnx(model, list(shared), case)
    feeds = {renamed[each.name]: case.inputs[each.name] for each in subject.inputs}
    expected = _in_tensorflow(graph_def, sorted(set(shared.values())), feeds)
    off = {}
    for name, there in shared.items():
        result = _relative(expected[there], actual[name])
        if result is not None:
            off[name] = result
    owners = _layers_of_tensors(model, subject.layers)
    last = {owners[name] or name: name for name in off}  # in the order of computation
    order = list(off)
    for name in sorted(last.values(), key=order.index):
        if off[name] > tolerance:
            return owners[name] or _origin(model, name, off, tolerance, owners)
    return ""


def _layers_of_tensors(model: OnnxModel, layers: Set[str]) -> dict[str, str]:
    """The layer of each tensor of an ONNX model, by its own name or its operation's."""
    return {
        name: layer_of(name, layers) or layer_of(node.name, layers)
        for node in model.graph.node
        for name in node.output
    }


def _origin(
    model: OnnxModel, tensor: str, off: dict[str, float], tolerance: float, owners: dict[str, str]
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
        named = [name for name in group if owners[name]]
        if named:
            return owners[max(named, key=order.__getitem__)]
    return ""


def refuse_overflow(model: OnnxModel, layers: Set[str], cases: Sequence[Case]) -> None:
    """Refuses a float32 model whose values are too large for float16 on the way.

    onnxruntime's CPU computes float16 models in float32 and would not notice what other devices
    turn into infinity.

    Raises:
        ExportError: naming the first layer with such a value.
    """
    owners = {name: layer for name, layer in _layers_of_tensors(model, layers).items() if name}
    for case in cases:
        values = _in_onnx(model, list(owners), case)
        for name, layer in owners.items():
            value = values[name]
            if value.dtype.kind != "f" or not value.size:
                continue
            largest = float(np.abs(value).max())
            if _LARGEST_HALF < largest < np.inf:
                where = f" in the layer {layer!r}" if layer else ""
                raise ExportError(
                    f"A value of {largest:.3g}{where} is more than the {_LARGEST_HALF:g} that "
                    f"float16 can hold, with {case.title}. Nothing was written. Choose float32, or "
                    "scale the inputs or weights of the model down.",
                    layer,
                )


def _relative(expected: Array, actual: Array) -> float | None:
    """The relative difference, in whichever order of dimensions fits; None if none does.

    Only of numbers: tf2onnx writes some conditions as the opposite and its negation, and the first
    keeps the name.
    """
    if expected.dtype.kind != "f":
        return None
    order = _CHANNELS_LAST.get(actual.ndim)
    forms = [actual, actual.transpose(order)] if order else [actual]
    fitting = [each for each in forms if each.shape == expected.shape]
    return min((_difference(expected, each)[1] for each in fitting), default=None)


def _in_onnx(model: OnnxModel, names: list[str], case: Case) -> Arrays:
    onnx = package("onnx")
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    there = {output.name for output in watched.graph.output}
    watched.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in there
    )
    return runner(watched)(case.inputs)


def _in_tensorflow(graph_def: GraphDef, names: list[str], feeds: dict[str, Any]) -> dict[str, Any]:
    """Values of a frozen graph's tensors, in a graph of its own.

    Made into a function, its loops would clash with those of the first trace, of the same names.
    """
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        values = session.run(names, feeds)
    return {name: np.asarray(value) for name, value in zip(names, values, strict=True)}
