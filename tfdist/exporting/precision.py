"""Coarser numbers for an ONNX model: float16 and int8, and what they cost on labelled data."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.exporting.examples import Examples
from tfdist.exporting.onnx_models import package
from tfdist.exporting.subject import Arrays, ExportError
from tfdist.types import Array, OnnxGraph, OnnxModel

__all__ = ["Score", "scores", "to_float16", "to_int8", "to_int8_static"]

_CALIBRATION_BATCH, _SCORING_BATCH = 16, 64


def to_float16(model: OnnxModel) -> OnnxModel:
    """The model with weights and sums in float16. Inputs and outputs keep their types.

    By onnxruntime's converter. That of onnxconverter-common leaves Cast operators behind that the
    ONNX checker refuses (onnxconverter-common#320).

    Raises:
        ExportError: if it cannot be converted.
    """
    copied = package("onnx").ModelProto()
    copied.CopyFrom(model)
    float16 = package("onnxruntime.transformers.float16")
    try:
        converted: OnnxModel = float16.convert_float_to_float16(copied, keep_io_types=True)
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
    quantization = package("onnxruntime.quantization")

    def quantise(before: str, after: str) -> None:
        nodes = package("onnx").load_model(before, load_external_data=False).graph.node
        # Excluded by name: with op_types_to_quantize onnxruntime 1.31 writes models with loops
        # that end the process which loads them.
        quantization.quantize_dynamic(
            before,
            after,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
            nodes_to_exclude=[node.name for node in nodes if node.op_type == "Conv"],
        )

    return _quantised(model, quantise)


def to_int8_static(model: OnnxModel, calibration: Examples) -> OnnxModel:
    """The model with int8 weights and activations, whose scales are found on examples.

    Raises:
        ExportError: if nothing of it can be quantised, or onnxruntime fails to.
    """
    quantization = package("onnxruntime.quantization")

    class _Reader(quantization.CalibrationDataReader):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self._parts = calibration.batches(_CALIBRATION_BATCH)

        def get_next(self) -> Arrays | None:
            return next(self._parts, None)

    def quantise(before: str, after: str) -> None:
        quantization.quantize_static(before, after, _Reader(), per_channel=True, reduce_range=True)

    return _quantised(model, quantise)


def _quantised(model: OnnxModel, quantise: Callable[[str, str], None]) -> OnnxModel:
    """Runs one of onnxruntime's quantisers, which work on files.

    Both are given `reduce_range`, which keeps weights within 7 bits: on x86 processors with AVX2
    and without VNNI, the sums of 8-bit products saturate ("Quantize ONNX models" in the manual of
    onnxruntime), and a file is often read on another machine than the one that wrote it.
    """
    onnx = package("onnx")
    shapes = package("onnxruntime.quantization.shape_inference")
    with tempfile.TemporaryDirectory(prefix="tfdist-int8-") as folder:
        names = ("model", "prepared", "quantised")
        written, prepared, done = (str(Path(folder) / f"{name}.onnx") for name in names)
        onnx.save_model(model, written)
        try:
            with _quiet():
                shapes.quant_pre_process(written, prepared, skip_symbolic_shape=True)
                quantise(prepared, done)
        except Exception as error:
            raise ExportError(f"onnxruntime cannot quantise the model: {error}") from error
        result: OnnxModel = onnx.load_model(done)
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


@dataclasses.dataclass(frozen=True)
class Score:
    """One output's score, before and after.

    Attributes:
        output: its name.
        metric: `accuracy` (the share of examples that are right) or `mean squared error`.
        model: of the model.
        written: of the written model.
        examples: how many were scored.
    """

    output: str
    metric: str
    model: float
    written: float
    examples: int

    @property
    def loss(self) -> float:
        """The loss: of accuracy, or the squared error's growth relative to the model's."""
        if self.metric == "accuracy":
            return self.model - self.written
        return (self.written - self.model) / self.model if self.model else self.written


def scores(
    model: Callable[[Arrays], Arrays], written: Callable[[Arrays], Arrays], examples: Examples
) -> tuple[Score, ...]:
    """Scores each output that has labels, as the model and as the written one compute it."""
    if not examples.labels or not len(examples):
        return ()
    before, after = _outputs(model, examples), _outputs(written, examples)
    result = []
    for name, labels in examples.labels.items():
        metric, score = _metric(labels, before[name])
        values = (score(labels, before[name]), score(labels, after[name]))
        result.append(Score(name, metric, *values, len(examples)))
    return tuple(result)


def _outputs(run: Callable[[Arrays], Arrays], examples: Examples) -> Arrays:
    parts = [run(inputs) for inputs in examples.batches(_SCORING_BATCH)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _metric(labels: Array, outputs: Array) -> tuple[str, Callable[[Any, Any], float]]:
    """Accuracy for classes, as numbers or one-hot, and for yes or no; else the squared error."""
    classes = outputs.shape[-1] if outputs.ndim > 1 else 1
    whole = labels.dtype.kind in "iub" or bool((labels == np.round(labels)).all())
    if classes > 1 and whole:
        if labels.shape == outputs.shape[:-1]:
            return "accuracy", lambda y, out: float((out.argmax(-1) == y).mean())
        if labels.shape == (*outputs.shape[:-1], 1):
            return "accuracy", lambda y, out: float((out.argmax(-1) == y[..., 0]).mean())
        if labels.shape == outputs.shape and (labels.sum(-1) == 1).all():
            return "accuracy", lambda y, out: float((out.argmax(-1) == y.argmax(-1)).mean())
    if classes == 1 and whole and set(np.unique(labels)) <= {0, 1}:
        threshold = 0.5 if outputs.min() >= 0 and outputs.max() <= 1 else 0.0
        return "accuracy", lambda y, out: float(
            ((out > threshold) == (y > 0).reshape(out.shape)).mean()
        )
    return "mean squared error", lambda y, out: float(((out - y.reshape(out.shape)) ** 2).mean())
