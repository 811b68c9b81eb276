"""Calls functions of the user with those arguments that they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.errors import ConfigError

__all__ = ["call_with", "parameters_of"]


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments that a function, a partial or a callable object takes."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters
    return tuple(name for name, each in parameters.items() if each.kind not in kinds)


def call_with(
    what: str,
    function: Callable[..., Any],
    offered: Mapping[str, Any],
    needed: tuple[str, ...] = (),
) -> Any:
    """Calls a function with those of the offered arguments that it names.

    Args:
        what: its role, such as `"model_fn"`, for messages.
        function: the function.
        offered: arguments by name.
        needed: arguments that it must take.

    Raises:
        ConfigError: if it takes one that is not offered and has no default, or lacks a needed one.
    """
    if not callable(function):
        raise ConfigError(f"{what}={function!r} is no function.")
    signature = inspect.signature(function)
    names = parameters_of(function)
    unknown = [
        name
        for name in names
        if name not in offered and signature.parameters[name].default is inspect.Parameter.empty
    ]
    missing = [name for name in needed if name not in names]
    if unknown or missing:
        wrong = f"takes {unknown[0]!r}" if unknown else f"does not take {missing[0]!r}"
        raise ConfigError(
            f"{what}{signature} {wrong}. It may take {', '.join(offered)}"
            f"{' and must take ' + ', '.join(needed) if needed else ''}."
        )
    return function(**{name: offered[name] for name in names if name in offered})
