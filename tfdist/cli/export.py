"""`tfdist export`: a model as ONNX or SavedModel, compared with the model before it is written."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfdist import environment
from tfdist.errors import ConfigError
from tfdist.utils.imports import quiet_import

if TYPE_CHECKING:
    from tfdist.exporting.comparison import Comparison
    from tfdist.exporting.exporter import Report


class _Format(enum.StrEnum):
    ONNX = "onnx"
    SAVED_MODEL = "saved_model"


class _Precision(enum.StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    INT8_STATIC = "int8_static"


_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A .keras file, the directory of a SavedModel, or a factory: file.py:function or "
        "module:function.",
    ),
]
_Out = Annotated[str, typer.Argument(metavar="OUT", help="Where to write.")]
_Form = Annotated[
    _Format | None,
    typer.Option("--format", help="By default onnx if OUT ends in .onnx, else saved_model."),
]
_Weights = Annotated[
    str | None,
    typer.Option(help="A .weights.h5 file, or a checkpoint of tf.train, for MODEL."),
]
_Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", help="NAME:DTYPE[SIZES], with ? for an open size. Repeatable."),
]
_Signature = Annotated[
    str | None, typer.Option(help="The signature of a SavedModel; serving_default.")
]
_Opset = Annotated[int, typer.Option(help="Version of the ONNX operators, 13 to 18.")]
_InPrecision = Annotated[_Precision, typer.Option(help="What an ONNX model computes in.")]
_Data = Annotated[
    str | None, typer.Option(help="An .npz file with x and y, to try, calibrate and score on.")
]
_Calibration = Annotated[
    int, typer.Option(help="How many of its first examples set the scales of int8_static.")
]
_Loss = Annotated[
    float | None, typer.Option(help="What int8 may cost on the data: 0.01 is a point.")
]
_Tolerance = Annotated[
    float | None,
    typer.Option(help="What an output may differ, relative to its largest magnitude."),
]
_Modules = Annotated[
    list[str] | None,
    typer.Option("--import", help="A module that registers MODEL's own layers. Repeatable."),
]
_Check = Annotated[
    bool, typer.Option("--check", help="Write nothing; compare the ONNX model OUT with MODEL.")
]


def export(
    model: _Model,
    out: _Out,
    form: _Form = None,
    weights: _Weights = None,
    inputs: _Inputs = None,
    signature: _Signature = None,
    opset: _Opset = 18,
    precision: _InPrecision = _Precision.FLOAT32,
    data: _Data = None,
    calibration: _Calibration = 128,
    accuracy_loss: _Loss = None,
    tolerance: _Tolerance = None,
    modules: _Modules = None,
    check: _Check = False,
) -> None:
    """Write MODEL to OUT as ONNX or SavedModel, once it computes the same as MODEL.

    Copy and paste:

    tfdist export model.keras model.onnx

    tfdist export model.keras serving --format saved_model

    tfdist export train.py:make_model model.onnx --weights last.weights.h5

    tfdist export model.keras model.onnx --input 'tokens:int32[?,128]' --opset 17

    tfdist export model.keras small.onnx --precision int8 --data test.npz --accuracy-loss 0.01

    tfdist export --check model.keras model.onnx

    If an output differs, nothing is written, what was there stays, and the first layer that
    differs is named. Exit status: 0 if they agree, 1 if not or if an operation has no ONNX
    operator, 2 for a mistake in the call.
    """
    if check:
        _refuse_with_check(form, precision)
    how: dict[str, Any] = {"opset": opset, "precision": precision.value, "format": form}
    how |= {"calibration": calibration, "accuracy_loss": accuracy_loss}
    arguments = {"inputs": inputs or (), "signature": signature, "weights": weights, "data": data}
    common = {**arguments, "tolerance": tolerance}
    done = _run(model, out, common, modules or [], None if check else how)
    _conclude(done, out) if check else _show(done)


def _run(
    model: str, out: str, common: dict[str, Any], modules: list[str], how: dict[str, Any] | None
) -> Any:
    """The report; if nothing is given of how to write, the comparison."""
    console = Console(stderr=True, highlight=False)
    with console.status("importing TensorFlow …") as status:
        exporter = _imported(modules)
        if how is None:
            status.update("comparing …")
            return exporter.compare(model, out, **common)
        how["note"] = lambda text: status.update(f"{text} …")
        return exporter.export(model, out, **common, **how)


def _imported(modules: list[str]) -> Any:
    """The exporter, imported only when it is needed, as it imports TensorFlow; and modules."""
    if environment.read("TF_CPP_MIN_LOG_LEVEL") is None:
        environment.set_for_good({"TF_CPP_MIN_LOG_LEVEL": "2"})
    with quiet_import():
        import tensorflow as tf

        from tfdist.exporting import exporter, loading

        tf.config.list_physical_devices()
    loading.import_modules(modules)
    return exporter


def _refuse_with_check(form: _Format | None, precision: _Precision) -> None:
    if form is not None or precision is not _Precision.FLOAT32:
        raise ConfigError(
            "--check compares what was written before, and --format and --precision say how to "
            "write. Leave them out."
        )


def _conclude(comparison: Comparison, out: str) -> None:
    console = _console()
    console.print(_differences(comparison))
    if comparison.ok:
        console.print(f"[green]agrees[/] to {comparison.tolerance:g}: {escape(out)}")
        return
    where = f" The first layer that differs is {comparison.layer!r}." if comparison.layer else ""
    console.print(f"[red]differs[/] by more than {comparison.tolerance:g}: {escape(out)}.{where}")
    raise typer.Exit(1)


def _show(report: Report) -> None:
    console = _console()
    console.print(_differences(report.comparison))
    if report.scores:
        console.print(_scores(report))
    kind = f"ONNX, opset {report.options.opset}, {report.options.precision}"
    kind = kind if report.options.format == "onnx" else "SavedModel"
    inputs = ", ".join(str(each) for each in report.inputs)
    console.print(
        f"[green]written[/] {escape(report.path)} ({kind}, {_bytes(report.size)}); "
        f"inputs {escape(inputs)}"
    )


def _differences(comparison: Comparison) -> Table:
    table = Table(title="Largest difference from the model", title_justify="left")
    for name in ("output", "absolute", "relative to its largest", "allowed", "with"):
        table.add_column(name, justify="left" if name in ("output", "with") else "right")
    for output in dict.fromkeys(each.output for each in comparison.differences):
        worst = comparison.worst_of(output)
        cells = (f"{worst.absolute:.1e}", f"{worst.relative:.1e}", f"{comparison.tolerance:g}")
        style = "red" if worst.relative > comparison.tolerance else ""
        table.add_row(escape(output), *cells, worst.case, style=style)
    tried = ", ".join(dict.fromkeys(each.case for each in comparison.differences))
    table.caption = f"tried: {tried}"
    return table


def _scores(report: Report) -> Table:
    table = Table(title="On the data", title_justify="left")
    for name in ("output", "score", "model", report.options.precision, "change", "examples"):
        table.add_column(name, justify="left" if name in ("output", "score") else "right")
    for each in report.scores:
        percent = each.metric == "accuracy"
        values = [f"{v:.2%}" if percent else f"{v:.4g}" for v in (each.model, each.written)]
        change = f"{-each.loss * 100:+.2f} points" if percent else f"{each.loss:+.2%}"
        table.add_row(escape(each.output), each.metric, *values, change, str(each.examples))
    return table


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def _bytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
