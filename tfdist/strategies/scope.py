"""The scope of a strategy: TensorFlow's own, with Keras and TensorFlow's constructors hooked."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.keras import scope as keras_scope
from tfdist.keras.hooks import PROGRAM, Hook, HookSet
from tfdist.strategies import constructors, device_settings
from tfdist.types import Strategy
from tfdist.utils.thread_state import Current

__all__ = ["Scope", "hooks"]

_Context = contextlib.AbstractContextManager[object]


class Scope:
    """TensorFlow's scope with Keras, and TensorFlow's constructors, hooked while it is open.

    Args:
        strategy: the strategy.
        make: makes TensorFlow's scope of the strategy.
        hooks: the strategy's own hooks besides those of all strategies.
    """

    def __init__(
        self, strategy: Strategy, make: Callable[[], _Context], hooks: HookSet | None = None
    ) -> None:
        self._strategy = strategy
        self._make = make
        own = [] if hooks is None else [hooks]
        self._hooks: list[Any] = [
            keras_scope,
            constructors.ConstructorHooks(strategy),
            _program_hooks,
            *own,
        ]
        self._opened: list[contextlib.ExitStack] = []

    def __enter__(self) -> object:
        if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not self._strategy:
            raise ConfigError(_two_scopes(tf.distribute.get_strategy(), self._strategy))
        # The stack undoes the steps that have succeeded, in reverse, whichever step fails.
        with contextlib.ExitStack() as undoing:
            for hooks in self._hooks:
                hooks.enter()
                undoing.callback(hooks.leave)
            scope = _OnGraph(self._make)
            entered = scope.enter()
            undoing.callback(scope.leave)
            undoing.enter_context(_open.set((*_open.value, scope)))
            self._opened.append(undoing.pop_all())
        return entered

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._opened.pop().__exit__(kind, error, trace)


class _OnGraph:
    """TensorFlow's scope of a strategy, which is kept in the default graph, eager or not.

    Args:
        make: makes the scope.
    """

    def __init__(self, make: Callable[[], _Context]) -> None:
        self._make = make

    def enter(self) -> object:
        """Enters the scope on the default graph."""
        self._context = self._make()
        return self._context.__enter__()

    def leave(self) -> None:
        """Leaves the scope on the default graph."""
        self._context.__exit__(None, None, None)


#: The scopes that are open, the outermost first.
_open: Current[tuple[_OnGraph, ...]] = Current(())


def hooks() -> list[Hook]:
    """The seams of TensorFlow at which a program changes what was there before it."""
    reset = Hook(tf.compat.v1, "reset_default_graph", _in_scopes)
    return [reset, *device_settings.hooks()]


def _in_scopes(original: Callable[[], None]) -> Callable[[], None]:
    """Scopes stay open if the default graph is reset, as `keras.backend.clear_session` does."""

    @functools.wraps(original)
    def reset_default_graph() -> None:
        former = tf.compat.v1.get_default_graph()
        original()
        with former.as_default():
            for scope in reversed(_open.value):
                scope.leave()
        for scope in _open.value:
            scope.enter()

    return reset_default_graph


_program_hooks = HookSet(hooks, PROGRAM)


def _two_scopes(outer: object, inner: object) -> str:
    names = [getattr(each, "name", None) or type(each).__name__ for each in (outer, inner)]
    return (
        f"The scope of a strategy {names[1]!r} was entered inside the scope of another strategy, "
        f"{names[0]!r}. A program has one strategy. `tfdist run` opens its scope before the script "
        "starts: the script gets that strategy from `tfdist.strategy()` or "
        "`tf.distribute.get_strategy()`, and need not make one."
    )
