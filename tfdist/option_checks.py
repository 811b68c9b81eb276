"""Checks that the options of several strategies share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist.errors import ConfigError

__all__ = ["check_number", "refuse_set"]


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


def check_number(name: str, value: object, least: int, why: str = "") -> None:
    """Refuses what is no whole number of at least so much.

    Raises:
        ConfigError: with `why` at the end of the message.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        text = f"{name}={value!r} is not a whole number of {least} or more. {why}"
        raise ConfigError(text.rstrip())
