"""Checks that the options of several strategies share."""

from __future__ import annotations

import dataclasses
import difflib
import operator
from collections.abc import Collection, Sequence
from typing import Any

from tfdist.errors import ConfigError

__all__ = ["check_choice", "check_number", "check_range", "refuse_set"]


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
        (least, operator.ge, "of {:g} or more"),
        (above, operator.gt, "above {:g}"),
        (most, operator.le, "at most {:g}"),
        (below, operator.lt, "below {:g}"),
    )
    asked = [(bound, holds, text) for bound, holds, text in bounds if bound is not None]
    if number and all(holds(value, bound) for bound, holds, _ in asked):
        return
    words = " and ".join(text.format(bound) for bound, _, text in asked)
    raise ConfigError(f"{name}={value!r} is not a number {words}. {why}".rstrip())
