"""The options of an export, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from tfdist.errors import ConfigError
from tfdist.exporting.subject import Input
from tfdist.utils.validation import check_choice, check_number, check_range

__all__ = ["TOLERANCES", "Options", "format_of"]

FORMATS = ("onnx", "saved_model")

#: Versions that tf2onnx 1.17 converts to and that the checker and onnxruntime accept.
OPSETS = range(13, 19)
DEFAULT_OPSET = 18

#: The precisions, each with the largest error of an output, relative to its largest magnitude. Two
#: float32 programs that add in another order stay far below the first; float16 has a relative step
#: of 1e-3. Of int8 this only distinguishes a broken conversion from a coarse one: only data show
#: what it costs.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "int8": 0.5, "int8_static": 0.5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of an export.

    Attributes:
        format: `onnx` or `saved_model`.
        precision: how an ONNX model computes: `float32` as the model does, `float16`, `int8`
            (weights; activations are scaled as they come) or `int8_static` (activations too, with
            scales from data).
        opset: the version of the ONNX operators.
        inputs: inputs as the exported model is to take them; others are the model's.
        tolerance: the largest error of an output, relative to its largest magnitude;
            None for that of `TOLERANCES`.
        calibration: how many of the first examples of the data set the scales of `int8_static`.
        accuracy_loss: how much of its accuracy (0 to 1), or of its squared error relative to the
            model's, `int8` may cost on the data; None for no limit.
    """

    format: str = "onnx"
    precision: str = "float32"
    opset: int = DEFAULT_OPSET
    inputs: tuple[Input, ...] = ()
    tolerance: float | None = None
    calibration: int = 128
    accuracy_loss: float | None = None

    def __post_init__(self) -> None:
        check_choice("format", self.format, FORMATS)
        check_choice("precision", self.precision, TOLERANCES)
        check_number("calibration", self.calibration, 1)
        if self.tolerance is not None:
            check_range("tolerance", self.tolerance, above=0)
        if self.accuracy_loss is not None:
            check_range("accuracy_loss", self.accuracy_loss, least=0)
        if self.opset not in OPSETS:
            raise ConfigError(
                f"opset={self.opset!r} is not a set of ONNX operators that can be written. "
                f"Choose {OPSETS[0]} to {OPSETS[-1]}; {DEFAULT_OPSET} is the default."
            )
        if self.format == "saved_model" and self.precision != "float32":
            raise ConfigError(
                f"precision={self.precision!r} conflicts with format='saved_model', which keeps "
                "the model's own. Choose format='onnx', or leave precision out."
            )
        if self.accuracy_loss is not None and not self.precision.startswith("int8"):
            raise ConfigError(
                f"accuracy_loss={self.accuracy_loss:g} limits what int8 costs, and "
                f"precision={self.precision!r}. Leave it out, or choose int8 or int8_static."
            )

    @property
    def allowed(self) -> float:
        """The tolerance that holds, relative to an output's largest magnitude."""
        return TOLERANCES[self.precision] if self.tolerance is None else self.tolerance

    @property
    def calibrating(self) -> int:
        """The number of examples that set scales, the first ones; they must not be scored."""
        return self.calibration if self.precision == "int8_static" else 0


def format_of(path: str | os.PathLike[str], wanted: str | None) -> str:
    """The format of a file to write, which must fit its place.

    Args:
        path: where the model is to be; a name that ends in `.onnx` is an ONNX model.
        wanted: the format that was asked for, if any.

    Raises:
        ConfigError: if name and format conflict, the directory is missing, or something else is
            already there.
    """
    target = Path(path)
    named = "onnx" if target.suffix == ".onnx" else None
    if wanted is not None:
        check_choice("format", wanted, FORMATS)
    if wanted == "saved_model" and named:
        raise ConfigError(
            f"format='saved_model' conflicts with {str(path)!r}, the name of an ONNX model. A "
            "SavedModel is a directory: choose a name without .onnx, or format='onnx'."
        )
    if wanted is None and named is None and target.suffix:
        raise ConfigError(
            f"The format of {str(path)!r} cannot be told from its name. Give format='onnx' or "
            "'saved_model', a name that ends in .onnx, or for a SavedModel one without an ending."
        )
    chosen = wanted or named or "saved_model"
    if not target.parent.is_dir():
        raise ConfigError(
            f"{str(target)!r} cannot be written: the directory {str(target.parent)!r} does not "
            "exist. Make it, or choose another path."
        )
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"{str(target)!r} cannot be written: its directory is not writable.")
    if chosen == "onnx" and target.is_dir():
        raise ConfigError(f"{str(target)!r} is a directory, and an ONNX model is a file. Name one.")
    if chosen == "saved_model" and target.is_file():
        raise ConfigError(f"{str(target)!r} is a file, and a SavedModel is a directory. Name one.")
    if chosen == "saved_model" and target.is_dir() and not _replaceable(target):
        raise ConfigError(
            f"{str(target)!r} is a directory that holds other things than a SavedModel. Choose "
            "another path, or empty it."
        )
    return chosen


def _replaceable(directory: Path) -> bool:
    return (directory / "saved_model.pb").is_file() or not any(directory.iterdir())
