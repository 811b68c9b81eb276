"""Coarser numbers for an ONNX model: float16, and int8 with or without calibration."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tfdist.exporting.errors import ExportError
from tfdist.exporting.examples import Examples
from tfdist.exporting.packages import package
from tfdist.exporting.subject import Arrays
from tfdist.types import OnnxGraph, OnnxModel

__all__ = ["to_float16", "to_int8", "to_int8_static"]

_BATCH = 16


def to_float16(model: OnnxModel) -> OnnxModel:
    """The model with weights and sums in float16. Inputs and outputs keep their types.

    By onnxruntime's converter. That of onnxconverter-common leaves Cast operators behind that the
    ONNX checker refuses (onnxconverter-common#320).

    Raises:
        ExportError: if it cannot be converted.
    """
    copied = package("onnx").ModelProto()
    copied.CopyFrom(model)
    try:
        converted = package("float16").convert_float_to_float16(copied, keep_io_types=True)
    except Exception as error:
        raise ExportError(f"The model cannot be converted to float16: {error}") from error
    _sort(converted.graph)
    return converted


def to_int8(model: OnnxModel) -> OnnxModel:
    """The model with int8 weights of its matrix products; activations are scaled as they come.

    Convolutions stay as they are: with scales found while it runs they get slower.

    Raises:
        ExportError: if nothing of it can be quantised, or onnxruntime fails to.
    """
    quantization = package("quantization")

    def quantise(before: str, after: str) -> None:
        nodes = package("onnx").load_model(before, load_external_data=False).graph.node
        # Excluded by name: with op_types_to_quantize onnxruntime 1.31 writes models with loops
        # that end the process which loads them.
        quantization.quantize_dynamic(
            before,
            after,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
            nodes_to_exclude=[node.name for node in nodes if node.op_type == "Conv"],
        )

    return _quantised(model, quantise)


def to_int8_static(model: OnnxModel, calibration: Examples) -> OnnxModel:
    """The model with int8 weights and activations, whose scales are found on examples.

    Args:
        model: the model.
        calibration: the examples.

    Raises:
        ExportError: if nothing of it can be quantised, or onnxruntime fails to.
    """
    quantization = package("quantization")

    class _Reader(quantization.CalibrationDataReader):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            starts = range(0, len(calibration), _BATCH)
            self._parts = iter([calibration.part(s, s + _BATCH).inputs for s in starts])

        def get_next(self) -> Arrays | None:
            return next(self._parts, None)

    def quantise(before: str, after: str) -> None:
        quantization.quantize_static(before, after, _Reader(), per_channel=True)

    return _quantised(model, quantise)


def _quantised(model: OnnxModel, quantise: Callable[..., Any]) -> OnnxModel:
    """Runs one of onnxruntime's quantisers, which work on files."""
    onnx = package("onnx")
    with tempfile.TemporaryDirectory(prefix="tfdist-int8-") as folder:
        names = ("model", "prepared", "quantised")
        written, prepared, done = (str(Path(folder) / f"{name}.onnx") for name in names)
        onnx.save_model(model, written)
        try:
            with _quiet():
                package("quantization_shapes").quant_pre_process(
                    written, prepared, skip_symbolic_shape=True
                )
                quantise(prepared, done)
        except Exception as error:
            raise ExportError(f"onnxruntime cannot quantise the model: {error}") from error
        result = onnx.load_model(done)
    if not any(node.op_type.endswith(("QuantizeLinear", "Integer")) for node in result.graph.node):
        raise ExportError(
            "Nothing of the model could be quantised: it has no matrix product with constant "
            "weights. Choose float32 or float16, or int8_static for convolutions."
        )
    return result


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the output of onnxruntime's quantisers off the terminal."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        root.setLevel(level)


def _sort(graph: OnnxGraph) -> None:
    """Puts operators after those they depend on.

    A workaround: the converter appends the casts of inputs at the end (onnxconverter-common#208).
    """
    produced = {name for node in graph.node for name in node.output}
    ready: set[str] = set()
    waiting, ordered = list(graph.node), []
    while waiting:
        later = []
        for node in waiting:
            if all(name in ready or name not in produced for name in node.input):
                ordered.append(node)
                ready.update(node.output)
            else:
                later.append(node)
        if len(later) == len(waiting):
            raise ExportError("The model converted to float16 depends on itself.")
        waiting = later
    del graph.node[:]
    graph.node.extend(ordered)
