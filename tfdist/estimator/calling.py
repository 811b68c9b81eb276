"""Calls functions of the user with those arguments that they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfdist.errors import ConfigError

__all__ = ["call_with", "check_parameters", "parameters_of"]


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The arguments that a function, a partial or a callable object takes, by name."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters
    return {name: each for name, each in parameters.items() if each.kind not in kinds}


def check_parameters(
    what: str,
    function: Callable[..., Any],
    allowed: Collection[str],
    needed: Collection[str] = (),
    *,
    defaults: bool = False,
) -> None:
    """Rejects values that are not functions of certain arguments.

    `what` is the role, such as `"model_fn"`, for messages. With `defaults` the function may take
    other arguments that have one.

    Raises:
        ConfigError: with the arguments that it may take.
    """
    if not callable(function):
        raise ConfigError(f"{what}={function!r} is no function.")
    taken = parameters_of(function)
    unknown = [
        name
        for name, each in taken.items()
        if name not in allowed and not (defaults and each.default is not inspect.Parameter.empty)
    ]
    missing = [name for name in needed if name not in taken]
    if unknown or missing:
        wrong = f"takes {unknown[0]!r}" if unknown else f"does not take {missing[0]!r}"
        must = f"must take {' and '.join(needed)}, and " if needed else ""
        raise ConfigError(f"{what} {wrong}. It {must}may take {', '.join(allowed)}.")


def call_with(function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Calls a function with those of the offered arguments that it takes."""
    return function(**{name: offered[name] for name in parameters_of(function) if name in offered})
