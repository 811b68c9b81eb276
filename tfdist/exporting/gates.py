"""The data that an export needs, and the limit of int8's cost on it."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.errors import ConfigError
from tfdist.exporting.errors import ExportError
from tfdist.exporting.examples import Examples
from tfdist.exporting.options import Options
from tfdist.exporting.scoring import Score

__all__ = ["calibrating", "check_examples", "check_loss"]


def calibrating(options: Options) -> int:
    """The number of examples that set scales, the first ones; they must not be scored."""
    return options.calibration if options.precision == "int8_static" else 0


def check_examples(examples: Examples | None, options: Options) -> None:
    """Refuses options that need data which was not given.

    Raises:
        ConfigError: naming the option.
    """
    if options.precision == "int8_static" and (
        examples is None or len(examples) < options.calibration
    ):
        there = "there is none" if examples is None else f"it has {len(examples)} examples"
        raise ConfigError(
            f"precision='int8_static' sets its scales on the first {options.calibration} examples "
            f"of the data, and {there}. Give more, or a smaller calibration, or choose int8."
        )
    scored = examples is not None and examples.labels
    if options.accuracy_loss is not None and not (
        scored and examples is not None and len(examples) > calibrating(options)
    ):
        raise ConfigError(
            f"accuracy_loss={options.accuracy_loss:g} needs data with labels (y), and examples "
            "beyond those of the calibration. Give data={'x': …, 'y': …}, or leave it out."
        )


def check_loss(scored: Sequence[Score], options: Options) -> None:
    """Refuses a score that is worse than `accuracy_loss` allows.

    Raises:
        ExportError: with both scores.
    """
    if options.accuracy_loss is None:
        return
    for each in scored:
        if each.loss > options.accuracy_loss:
            raise ExportError(
                f"{options.precision} changes the {each.metric} of {each.output!r} from "
                f"{each.model:.4g} to {each.written:.4g} on {each.examples} examples, more than "
                f"accuracy_loss={options.accuracy_loss:g} allows. Nothing was written."
            )
