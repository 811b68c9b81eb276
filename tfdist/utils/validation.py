"""Checks that the options of several strategies share."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Collection
from typing import Any

from tfdist.errors import ConfigError

__all__ = [
    "LONGEST_SECONDS",
    "check_choice",
    "check_number",
    "check_range",
]

#: The longest time-out, a year: timers of the operating system take no arbitrary number.
LONGEST_SECONDS = 365 * 24 * 3600.0


def check_choice(what: str, value: object, choices: Collection[str]) -> None:
    """Validates a value against a set of names.

    Raises:
        ConfigError: with the names, and the one that was perhaps meant.
    """
    if value in choices:
        return
    close = difflib.get_close_matches(str(value), list(choices), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"Unknown {what} {value!r}.{hint} There are: {', '.join(choices)}.")


def check_number(name: str, value: object, least: int, why: str = "") -> None:
    """Validates a whole number against a lower bound.

    Raises:
        ConfigError: with `why` at the end of the message.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        text = f"{name}={value!r} is not a whole number of {least} or more. {why}"
        raise ConfigError(text.rstrip())


def check_range(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    why: str = "",
) -> None:
    """Validates a number against optional bounds.

    Raises:
        ConfigError: with the bounds, and `why` at the end of the message.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    bounds = (
        (least, operator.ge, "of {:.10g} or more"),
        (above, operator.gt, "above {:.10g}"),
        (most, operator.le, "at most {:.10g}"),
        (below, operator.lt, "below {:.10g}"),
    )
    asked = [(bound, holds, text) for bound, holds, text in bounds if bound is not None]
    if number and all(holds(value, bound) for bound, holds, _ in asked):
        return
    words = " and ".join(text.format(bound) for bound, _, text in asked)
    raise ConfigError(f"{name}={value!r} is not a number {words}. {why}".rstrip())
