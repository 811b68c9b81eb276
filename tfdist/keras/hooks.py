"""Hooks into Keras that hold inside a strategy's scope and are undone on exit.

A hook replaces one attribute of a Keras module or class. Scopes nest and threads share them, so the
hooks go in with the first scope that is entered and out with the last one that is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Hook(NamedTuple):
    """One attribute to replace: `setattr(owner, name, make(original))`."""

    owner: Any
    name: str
    make: Callable[[Any], Any]

    @property
    def path(self) -> str:
        """Where the seam is, as an importable name."""
        module = getattr(self.owner, "__module__", None)
        own = getattr(self.owner, "__qualname__", self.owner.__name__)
        return f"{module}.{own}.{self.name}" if module else f"{own}.{self.name}"


class HookSet:
    """Hooks that are installed while at least one scope is open."""

    def __init__(self, hooks: Callable[[], list[Hook]]) -> None:
        self._hooks = hooks
        self._lock = threading.RLock()
        self._depth = 0
        self._undo: list[tuple[Any, str, bool, Any]] = []

    @property
    def installed(self) -> bool:
        """Whether Keras is hooked at this moment."""
        return self._depth > 0

    def enter(self) -> None:
        """Installs the hooks unless an outer scope has done so."""
        with self._lock:
            if self._depth == 0:
                for hook in self._hooks():
                    self._install(hook)
            self._depth += 1

    def leave(self) -> None:
        """Restores what was there, when the outermost scope closes."""
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                while self._undo:
                    owner, name, own, original = self._undo.pop()
                    if own:
                        setattr(owner, name, original)
                    else:
                        delattr(owner, name)

    def _install(self, hook: Hook) -> None:
        original = getattr(hook.owner, hook.name)
        own = hook.name in vars(hook.owner)
        kept = vars(hook.owner)[hook.name] if own else original
        self._undo.append((hook.owner, hook.name, own, kept))
        setattr(hook.owner, hook.name, hook.make(original))
