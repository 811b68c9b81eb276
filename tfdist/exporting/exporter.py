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
from tfdist.exporting import conversion, loading, precision, saved_model
from tfdist.exporting.comparison import Comparison, compared, first_difference, refuse_overflow
from tfdist.exporting.examples import Case, Examples, cases_of, read
from tfdist.exporting.onnx_models import described, opened, package, precision_of, runner
from tfdist.exporting.options import TOLERANCES, Options, format_of
from tfdist.exporting.precision import Score, scores
from tfdist.exporting.subject import (
    ExportError,
    Input,
    KerasSubject,
    Subject,
    fitted,
    subject_of,
)
from tfdist.keras import saving, updating
from tfdist.types import Model, OnnxModel
from tfdist.utils.validation import check_choice

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
    for name in options:
        check_choice("option", name, [field.name for field in dataclasses.fields(Options)])
    wanted = Options(format=format_of(path, format), inputs=_inputs(inputs), **options)
    arrays = _arrays(data)
    if wanted.format == "onnx":
        for name in ("tf2onnx", "onnx", "onnxruntime"):
            package(name)  # An error comes before anything takes time.
    note("loading the model")
    subject = _subject(model, weights, signature, wanted.inputs)
    with subject.scope():
        return _run(subject, wanted, arrays, Path(path), note)


def _run(
    subject: Subject, options: Options, arrays: Mapping[str, Any] | None, path: Path, note: Note
) -> Report:
    note("trying the model")
    examples = None if arrays is None else Examples.of(arrays, subject)
    _check_examples(examples, options)
    try:
        cases = cases_of(subject, examples, options.precision)
    except ConfigError:
        if options.format == "onnx":
            conversion.convertible(subject)  # Its error names the cause.
        raise
    task = _Task(subject, options, examples, cases, note)
    make = _onnx if options.format == "onnx" else _saved_model
    result, scored = make(task, path)
    files = path.rglob("*") if path.is_dir() else (path,)
    size = sum(file.stat().st_size for file in files if file.is_file())
    return Report(os.fspath(path), options, subject.inputs, result, scored, size)


def _check_examples(examples: Examples | None, options: Options) -> None:
    """Refuses options that need data which was not given."""
    count = 0 if examples is None else len(examples)
    if count < options.calibrating:
        there = "there is none" if examples is None else f"it has {count} examples"
        raise ConfigError(
            f"precision='int8_static' sets its scales on the first {options.calibration} examples "
            f"of the data, and {there}. Give more, or a smaller calibration, or choose int8."
        )
    labels = examples is not None and examples.labels
    if options.accuracy_loss is not None and not (labels and count > options.calibrating):
        raise ConfigError(
            f"accuracy_loss={options.accuracy_loss:g} needs data with labels (y), and examples "
            "beyond those of the calibration. Give data={'x': …, 'y': …}, or leave it out."
        )


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
    requested = _inputs(inputs)
    subject = _subject(model, weights, signature, requested)
    if not requested:
        _narrow(subject, described(written))
    kind = precision_of(written)
    allowed = TOLERANCES[kind] if tolerance is None else tolerance
    run = runner(os.fspath(path))
    with subject.scope():
        examples = None if arrays is None else Examples.of(arrays, subject)
        cases = cases_of(subject, examples, kind)
        result = compared(run, cases, allowed)
        return result if result.ok else _blamed(result, subject, written, cases)


@dataclasses.dataclass(frozen=True)
class _Task:
    """An export under way."""

    subject: Subject
    options: Options
    examples: Examples | None
    cases: list[Case]
    note: Note


def _onnx(task: _Task, path: Path) -> tuple[Comparison, tuple[Score, ...]]:
    """Converts, checks and writes an ONNX model."""
    options, subject, examples = task.options, task.subject, task.examples
    task.note(f"converting to ONNX, opset {options.opset}")
    model = conversion.convert(subject, options.opset)
    exact = options.precision == "float32"
    task.note("comparing with the model")
    result = _checked(model, task, options.allowed if exact else TOLERANCES["float32"])
    if not exact:
        task.note(f"converting to {options.precision}")
        model = _coarser(model, task)
        conversion.check(model)
        result = _checked(model, task, options.allowed)
    scored: tuple[Score, ...] = ()
    if examples is not None:
        task.note("scoring on the data")
        scored = scores(subject.compute, runner(model), examples.part(options.calibrating))
        _check_loss(scored, options)
    _publish(subject, path, lambda target: conversion.write(model, target))
    return result, scored


def _coarser(model: OnnxModel, task: _Task) -> OnnxModel:
    if task.options.precision == "float16":
        refuse_overflow(model, task.subject.layers, task.cases)
        return precision.to_float16(model)
    if task.options.precision == "int8":
        return precision.to_int8(model)
    assert task.examples is not None  # _check_examples has seen to it
    return precision.to_int8_static(model, task.examples.part(0, task.options.calibration))


def _check_loss(scored: Sequence[Score], options: Options) -> None:
    """Refuses a score that is worse than `accuracy_loss` allows."""
    for each in scored:
        if options.accuracy_loss is not None and each.loss > options.accuracy_loss:
            raise ExportError(
                f"{options.precision} changes the {each.metric} of {each.output!r} from "
                f"{each.model:.4g} to {each.written:.4g} on {each.examples} examples, more than "
                f"accuracy_loss={options.accuracy_loss:g} allows. Nothing was written."
            )


def _saved_model(task: _Task, path: Path) -> tuple[Comparison, tuple[Score, ...]]:
    """Writes a SavedModel elsewhere, loads and compares it, and puts it in its place."""
    subject = task.subject
    if not isinstance(subject, KerasSubject):
        raise ConfigError(
            "format='saved_model' conflicts with a model that is a SavedModel already. Copy its "
            "directory, or choose format='onnx'."
        )
    with tempfile.TemporaryDirectory(prefix="tfdist-export-") as folder:
        staged = os.path.join(folder, "model")
        task.note("writing a SavedModel")
        saved_model.write(subject, staged)
        task.note("loading it back and comparing")
        run = saved_model.reloaded(subject, staged)
        result = compared(run, task.cases, task.options.allowed)
        if not result.ok:
            raise _difference(result)
        scored = scores(subject.compute, run, task.examples) if task.examples else ()
        _publish(subject, path, lambda final: shutil.copytree(staged, final))
    return result, scored


def _checked(model: OnnxModel, task: _Task, allowed: float) -> Comparison:
    """Compares an ONNX model with the model, and names the layer if it fails."""
    result = compared(runner(model), task.cases, allowed)
    if not result.ok:
        raise _difference(_blamed(result, task.subject, model, task.cases))
    return result


def _blamed(
    comparison: Comparison, subject: Subject, model: OnnxModel, cases: list[Case]
) -> Comparison:
    """A failed comparison with the first layer that differs, if one can be found."""
    case = next(case for case in cases if case.title == comparison.worst.case)
    layer = first_difference(subject, model, case, comparison.tolerance)
    return dataclasses.replace(comparison, layer=layer)


def _difference(comparison: Comparison) -> ExportError:
    worst = comparison.worst
    where = f" The first layer that differs is {comparison.layer!r}." if comparison.layer else ""
    return ExportError(
        f"The output {worst.output!r} differs from the model's by {worst.absolute:.2g} "
        f"({worst.relative:.2g} of its largest magnitude; {comparison.tolerance:g} is allowed) "
        f"with {worst.case}.{where} Nothing was written.",
        comparison.layer,
    )


def _publish(subject: Subject, path: Path, write: Callable[[str], Any]) -> None:
    """Puts a file that has passed its checks in its place; of several workers one does."""

    def put() -> None:
        saving.replace_file(os.fspath(path), write)

    if isinstance(subject, KerasSubject):
        saving.write_once(subject.model, os.fspath(path), put)
    else:
        put()


def _subject(
    model: Model | str | os.PathLike[str],
    weights: str | os.PathLike[str] | None,
    signature: str | None,
    requested: tuple[Input, ...],
) -> Subject:
    if isinstance(model, str | os.PathLike):
        model = loading.load(os.fspath(model), None if weights is None else os.fspath(weights))
    elif weights is not None:
        loading.restore(model, os.fspath(weights))
    subject = subject_of(model, requested, signature)
    if isinstance(subject, KerasSubject):
        with subject.scope():
            updating.flush(subject.model, batches=False)
    return subject


def _narrow(subject: Subject, there: Sequence[Input]) -> None:
    """Gives the subject the sizes that an ONNX model fixes."""
    names = {each.name for each in subject.inputs}
    if not {each.name for each in there} <= names:
        raise ConfigError(
            f"The ONNX model takes {', '.join(map(str, there))}, and the model "
            f"{', '.join(map(str, subject.inputs))}. It is of another model."
        )
    subject.inputs = fitted(subject.inputs, there)


def _inputs(inputs: Inputs) -> tuple[Input, ...]:
    return tuple(each if isinstance(each, Input) else Input.parse(each) for each in inputs)


def _arrays(data: Data) -> Mapping[str, Any] | None:
    return data if data is None or isinstance(data, Mapping) else read(os.fspath(data))
