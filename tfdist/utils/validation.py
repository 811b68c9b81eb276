"""Checks that the options of several strategies share."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import operator
import sys
import typing
from collections.abc import Collection, Sequence
from typing import Any

from tfdist.errors import ConfigError

__all__ = [
    "LONGEST_SECONDS",
    "check_choice",
    "check_number",
    "check_range",
    "check_type",
    "refuse_set",
]

#: The longest time-out, a year: timers of the operating system take no arbitrary number.
LONGEST_SECONDS = 365 * 24 * 3600.0

#: The types of options: the words for each, and an example of how TOML writes it.
_TYPES: dict[type, tuple[str, str]] = {
    bool: ("true or false", "true"),
    int: ("a whole number", "2"),
    float: ("a number", "0.5"),
    str: ("text in quotes", '"…"'),
}


def check_type(
    name: str,
    value: object,
    hint: Any,
    choices: Collection[str] = (),
    example: str | None = None,
) -> None:
    """Refuses a value of another type than the option's.

    Args:
        name: the option.
        value: its value.
        hint: the type that is annotated, such as `int | None`.
        choices: the values of an option that has few, for the message.
        example: a value as TOML writes it, for the message; by default one for the type.

    Raises:
        ConfigError: with the value, and the values that are allowed.
    """
    kinds = typing.get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return
    kind = next(each for each in kinds if each in _TYPES)
    if _is_a(value, kind):
        return
    words, usual = _TYPES[kind]
    written = f"Write it as in {name} = {example or usual}."
    allowed = f"Give one of: {', '.join(choices)}." if choices else written
    raise ConfigError(f"{name}={value!r} is not {words}. {allowed}")


def _is_a(value: object, kind: type) -> bool:
    """Whether a value is of a type; whole numbers are numbers, but truth values are not."""
    if kind in (bool, str):
        return isinstance(value, kind)
    if isinstance(value, bool):
        return False
    if kind is int:
        return isinstance(value, numbers.Integral)
    # Not math.isfinite, which fails for whole numbers that no float can hold.
    size: Any = abs(value) if isinstance(value, numbers.Real) else float("inf")
    return bool(size <= sys.float_info.max)


def refuse_set(config: Any, names: Sequence[str], owner: str, why: str) -> None:
    """Refuses options that only another strategy has.

    Args:
        config: a `StrategyConfig` of a strategy that does not have them.
        names: the options, which must have their defaults.
        owner: the strategy that has them.
        why: what is wrong, following the strategy's name in the message.

    Raises:
        ConfigError: for the first that is set.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in names:
        value = getattr(config, name)
        if value != defaults[name]:
            raise ConfigError(
                f"{name}={value!r} conflicts with strategy={config.strategy!r}{why} "
                f"Choose strategy={owner!r}, or leave {name} out."
            )


def check_choice(what: str, value: object, choices: Collection[str]) -> None:
    """Refuses what is none of some names.

    Raises:
        ConfigError: with the names, and the one that was perhaps meant.
    """
    if value in choices:
        return
    close = difflib.get_close_matches(str(value), list(choices), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"Unknown {what} {value!r}.{hint} There are: {', '.join(choices)}.")


def check_number(name: str, value: object, least: int, why: str = "") -> None:
    """Refuses what is no whole number of at least so much.

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
    """Refuses what is no number within bounds, of which each may be left out.

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
