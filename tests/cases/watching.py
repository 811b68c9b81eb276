"""Watches what a process does to files, with Python's audit hooks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

_moved: list[str] = []
_die_before: dict[str, int] = {}
_hooked = False


@contextlib.contextmanager
def moves() -> Iterator[list[str]]:
    """Collects the names of the files that this process moves into place."""
    _hook()
    _moved.clear()
    yield _moved


def die_before_move(name: str, count: int) -> None:
    """Kills this process with -9 just before it moves a file of this name for the n-th time."""
    _hook()
    _die_before[name] = count


def _hook() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_on_event)


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "os.rename":
        return
    name = os.path.basename(os.fspath(arguments[1]))
    _moved.append(name)
    if name in _die_before:
        _die_before[name] -= 1
        if _die_before[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
