"""`tfdist.export` and `tfdist.exporting.compare`: load, convert, check, and only then write."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import ConfigError
from tfdist.exporting import comparison, conversion, loading, precision, saved_model
from tfdist.exporting.comparison import Comparison
from tfdist.exporting.culprit import first_difference, refuse_overflow
from tfdist.exporting.errors import ExportError
from tfdist.exporting.examples import Examples
from tfdist.exporting.examples import read as read_examples
from tfdist.exporting.gates import calibrating, check_examples, check_loss
from tfdist.exporting.onnx_file import described, opened, precision_of
from tfdist.exporting.options import TOLERANCES, Options, format_of, options_from
from tfdist.exporting.packages import package
from tfdist.exporting.samples import Case, case_of_data, cases_of
from tfdist.exporting.scoring import Score, scores
from tfdist.exporting.signature import Input
from tfdist.exporting.subject import KerasSubject, Subject, subject_of
from tfdist.keras import saving, updating
from tfdist.types import Model, OnnxModel

__all__ = ["Report", "compare", "export"]

Data = Mapping[str, Any] | str | os.PathLike[str] | None
Inputs = Sequence[Input | str]
Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Report:
    """The file that was written, and the comparison with its model.

    Attributes:
        path: where it is.
        options: how it was made.
        inputs: its inputs.
        comparison: its outputs beside the model's.
        scores: the cost of a coarser precision, on the user's data.
        size: its size in bytes.
    """

    path: str
    options: Options
    inputs: tuple[Input, ...]
    comparison: Comparison
    scores: tuple[Score, ...]
    size: int


def export(
    model: Model | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    inputs: Inputs = (),
    signature: str | None = None,
    weights: str | os.PathLike[str] | None = None,
    data: Data = None,
    note: Note = lambda text: None,
    **options: Any,
) -> Report:
    """Writes a model as ONNX or SavedModel, after comparing it with the model on inputs.

    All workers of a job call it, like `model.save`; one of them writes.

    Args:
        model: a Keras model, a `.keras` file, a SavedModel, or a factory such as
            `file.py:function`.
        path: where to write; what is there stays until the new model has passed its checks.
        format: `onnx` or `saved_model`; by default by the path.
        inputs: inputs as the exported model is to take them, such as `tokens:int32[?,128]`.
        signature: of a SavedModel, which of its signatures.
        weights: a file or checkpoint to read the model's weights from.
        data: an `.npz` file, or arrays by name: `x` (or the inputs' names) and `y` (or the
            outputs' names).
        note: called with the present step.
        **options: `precision`, `opset`, `tolerance`, `calibration`, `accuracy_loss`: see `Options`.

    Raises:
        ConfigError: for a mistake in the call.
        ExportError: if the model cannot be converted, or the result differs from it.
        SaveError: if the disk refuses.
    """
    wanted = options_from(format=format_of(path, format), inputs=_inputs(inputs), **options)
    arrays = _arrays(data)
    if wanted.format == "onnx":
        _check_packages()
    note("loading the model")
    subject = _subject(model, weights, signature, wanted.inputs)
    with subject.scope():
        return _run(subject, wanted, arrays, os.fspath(path), note)


def _run(
    subject: Subject, options: Options, arrays: Mapping[str, Any] | None, path: str, note: Note
) -> Report:
    note("trying the model")
    examples = None if arrays is None else Examples.of(arrays, subject)
    check_examples(examples, options)
    try:
        cases = _cases(subject, examples, options.precision)
    except ConfigError:
        if options.format == "onnx":
            conversion.convertible(subject)  # Its error names the cause.
        raise
    task = _Task(subject, options, examples, cases, note)
    make = _onnx if options.format == "onnx" else _saved_model
    result, scored = make(task, path)
    return Report(path, options, subject.inputs, result, scored, _size(Path(path)))


def compare(
    model: Model | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    inputs: Inputs = (),
    signature: str | None = None,
    weights: str | os.PathLike[str] | None = None,
    data: Data = None,
    tolerance: float | None = None,
) -> Comparison:
    """Compares an ONNX model that exists with the model that it was made from.

    Args:
        model: see `export`.
        path: the ONNX model.
        inputs: see `export`; by default those of the ONNX model.
        signature: see `export`.
        weights: see `export`.
        data: see `export`; its inputs are tried, too.
        tolerance: see `export`; by default that of the ONNX model's precision.

    Returns:
        All differences. If some are too large, `layer` is the first layer that differs.

    Raises:
        ConfigError: for a mistake in the call.
        ExportError: if the ONNX model does not run.
    """
    written = opened(os.fspath(path))
    arrays = _arrays(data)
    given = _inputs(inputs)
    subject = _subject(model, weights, signature, given)
    if not given:
        subject = _narrowed(subject, described(written))
    kind = precision_of(written)
    allowed = TOLERANCES[kind] if tolerance is None else tolerance
    run = comparison.runner(comparison.session_of(os.fspath(path)))
    with subject.scope():
        examples = None if arrays is None else Examples.of(arrays, subject)
        cases = _cases(subject, examples, kind)
        result = comparison.compared(run, cases, allowed)
        return result if result.ok else _blamed(result, subject, written, cases)


@dataclasses.dataclass(frozen=True)
class _Task:
    """An export under way."""

    subject: Subject
    options: Options
    examples: Examples | None
    cases: list[Case]
    note: Note


def _onnx(task: _Task, path: str) -> tuple[Comparison, tuple[Score, ...]]:
    """Converts, checks and writes an ONNX model."""
    options, subject = task.options, task.subject
    task.note(f"converting to ONNX, opset {options.opset}")
    model = conversion.convert(subject, options.opset)
    exact = options.precision == "float32"
    task.note("comparing with the model")
    allowed = options.allowed if exact else TOLERANCES["float32"]
    result = _checked(model, task, allowed)
    scored: tuple[Score, ...] = ()
    if not exact:
        task.note(f"converting to {options.precision}")
        model = _coarser(model, task)
        conversion.check(model)
        result = _checked(model, task, options.allowed)
    if task.examples is not None:
        task.note("scoring on the data")
        run = comparison.runner(comparison.session_of(model))
        unseen = task.examples.part(calibrating(options))
        scored = scores(subject.compute, run, unseen) if len(unseen) else ()
        check_loss(scored, options)
    _publish(subject, path, lambda place: conversion.write(model, place))
    return result, scored


def _saved_model(task: _Task, path: str) -> tuple[Comparison, tuple[Score, ...]]:
    """Writes a SavedModel elsewhere, loads and compares it, and puts it in its place."""
    subject = task.subject
    if not isinstance(subject, KerasSubject):
        raise ConfigError(
            "format='saved_model' conflicts with a model that is a SavedModel already. Copy its "
            "directory, or choose format='onnx'."
        )
    with tempfile.TemporaryDirectory(prefix="tfdist-export-") as folder:
        place = os.path.join(folder, "model")
        task.note("writing a SavedModel")
        saved_model.write(subject, place)
        task.note("loading it back and comparing")
        run = saved_model.reloaded(subject, place)
        result = comparison.compared(run, task.cases, task.options.allowed)
        if not result.ok:
            raise _difference(result)
        scored = scores(subject.compute, run, task.examples) if task.examples else ()
        _publish(subject, path, lambda final: shutil.copytree(place, final))
    return result, scored


def _checked(model: OnnxModel, task: _Task, allowed: float) -> Comparison:
    """Compares an ONNX model with the model, and names the layer if it fails."""
    run = comparison.runner(comparison.session_of(model))
    result = comparison.compared(run, task.cases, allowed)
    if not result.ok:
        raise _difference(_blamed(result, task.subject, model, task.cases))
    return result


def _blamed(found: Comparison, subject: Subject, model: OnnxModel, cases: list[Case]) -> Comparison:
    """A failed comparison with the first layer that differs, if one can be found."""
    case = next(case for case in cases if case.title == found.worst.case)
    culprit = first_difference(subject, model, case, found.tolerance)
    return dataclasses.replace(found, layer=culprit.layer if culprit else "")


def _difference(found: Comparison) -> ExportError:
    worst = found.worst
    where = f" The first layer that differs is {found.layer!r}." if found.layer else ""
    return ExportError(
        f"The output {worst.output!r} differs from the model's by {worst.absolute:.2g} "
        f"({worst.relative:.2g} of its largest magnitude; {found.tolerance:g} is allowed) with "
        f"{worst.case}.{where} Nothing was written.",
        found.layer,
    )


def _coarser(model: OnnxModel, task: _Task) -> OnnxModel:
    if task.options.precision == "float16":
        refuse_overflow(model, task.subject.layers, task.cases)
        return precision.to_float16(model)
    if task.options.precision == "int8":
        return precision.to_int8(model)
    assert task.examples is not None  # _check_examples has seen to it
    return precision.to_int8_static(model, task.examples.part(0, task.options.calibration))


def _publish(subject: Subject, path: str, write: Callable[[str], Any]) -> None:
    """Puts a file that has passed its checks in its place; of several workers one does."""

    def put() -> None:
        saving.replace_file(path, write)

    if isinstance(subject, KerasSubject):
        saving.write_once(subject.model, path, put)
    else:
        put()


def _subject(
    model: Model | str | os.PathLike[str],
    weights: str | os.PathLike[str] | None,
    signature: str | None,
    given: tuple[Input, ...],
) -> Subject:
    if isinstance(model, str | os.PathLike):
        model = loading.load(os.fspath(model), None if weights is None else os.fspath(weights))
    elif weights is not None:
        loading.restore(model, os.fspath(weights))
    subject = subject_of(model, given, signature)
    if isinstance(subject, KerasSubject):
        with subject.scope():
            updating.flush(subject.model, batches=False)
    return subject


def _narrowed(subject: Subject, there: Sequence[Input]) -> Subject:
    """The subject with the sizes that an ONNX model fixes."""
    names = {each.name for each in subject.inputs}
    if not {each.name for each in there} <= names:
        raise ConfigError(
            f"The ONNX model takes {', '.join(map(str, there))}, and the model "
            f"{', '.join(map(str, subject.inputs))}. It is of another model."
        )
    subject.refit(there)
    return subject


def _cases(subject: Subject, examples: Examples | None, kind: str) -> list[Case]:
    """The inputs to compare on: drawn ones and the user's, or only the user's.

    The scales of int8_static hold for inputs like those that set them, and no others.
    """
    if examples is None:
        if kind == "int8_static":
            raise ConfigError(
                "An int8_static model is right on inputs like those that set its scales. Give "
                "such inputs: --data FILE.npz, or data={'x': …} in Python."
            )
        return cases_of(subject)
    own = [case_of_data(subject, examples.part(0, count).inputs) for count in (1, 32)]
    if kind == "int8_static":
        return own
    try:
        return [*cases_of(subject), *own]
    except ConfigError:
        return own


def _inputs(given: Inputs) -> tuple[Input, ...]:
    return tuple(each if isinstance(each, Input) else Input.parse(each) for each in given)


def _arrays(data: Data) -> Mapping[str, Any] | None:
    if data is None or isinstance(data, Mapping):
        return data
    return read_examples(os.fspath(data))


def _check_packages() -> None:
    """Finds out what is not installed before anything takes time."""
    for name in ("tf2onnx", "onnx", "onnxruntime"):
        package(name)


def _size(place: Path) -> int:
    files = place.rglob("*") if place.is_dir() else (place,)
    return sum(file.stat().st_size for file in files if file.is_file())
