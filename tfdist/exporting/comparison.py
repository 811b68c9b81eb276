"""Does an ONNX model, or a SavedModel, compute what the model computes?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.exporting.errors import ExportError
from tfdist.exporting.packages import package
from tfdist.exporting.samples import Case
from tfdist.exporting.subject import Arrays
from tfdist.types import Array, OnnxModel, OnnxSession

__all__ = ["Comparison", "Difference", "compared", "difference", "runner", "session_of"]


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


def difference(expected: Array, actual: Array) -> tuple[float, float]:
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


def compared(
    run: Callable[[Arrays], Arrays], cases: Sequence[Case], tolerance: float
) -> Comparison:
    """Runs the written model on each case.

    Args:
        run: computes outputs from inputs, both by name.
        cases: inputs, and the model's outputs.
        tolerance: the largest error of an output, relative to its largest magnitude.

    Raises:
        ExportError: if it does not run.
    """
    result: list[Difference] = []
    for case in cases:
        try:
            actual = run(case.inputs)
        except Exception as error:
            text = str(error).strip().splitlines()[0]
            raise ExportError(
                f"What was written does not run with {case.title}, which the model accepts: {text}"
            ) from error
        for name, expected in case.expected.items():
            if name not in actual:
                raise ExportError(
                    f"The model has an output {name!r}, and what was written only "
                    f"{', '.join(map(repr, actual))}. It is of another model."
                )
            absolute, relative = difference(expected, actual[name])
            result.append(Difference(name, case.title, absolute, relative))
    return Comparison(tolerance, tuple(result))


def session_of(model: OnnxModel | str) -> OnnxSession:
    """An onnxruntime session on the CPU.

    Args:
        model: a `ModelProto` or the path of an ONNX file.

    Raises:
        ExportError: if onnxruntime refuses the model.
    """
    runtime = package("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # its warnings concern its own optimisations
    source = model if isinstance(model, str) else model.SerializeToString()
    try:
        return runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        text = str(error).strip().splitlines()[0]
        raise ExportError(f"onnxruntime refuses the model: {text}") from error


def runner(session: OnnxSession) -> Callable[[Arrays], Arrays]:
    """A function of arrays by name, on a session; inputs that it does not have are left out."""
    inputs = [each.name for each in session.get_inputs()]
    outputs = [each.name for each in session.get_outputs()]

    def run(values: Arrays) -> Arrays:
        feeds = {name: values[name] for name in inputs if name in values}
        return dict(zip(outputs, session.run(outputs, feeds), strict=True))

    return run
