"""Turns of the serving tasks of a machine, which leave one of few cores to the chief.

This module imports next to nothing: a server takes its first turn before its other imports.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence

__all__ = ["turn"]

#: Seconds that a server waits for its turn at most: many would take too long one by one.
_LONGEST = 1.5


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """A block of imports that the servers of a user run one after the other.

    The chief imports TensorFlow meanwhile, which takes longer, and all wait for the chief: one core
    is left to it. As many servers as there are other cores have a turn at a time. A turn is a name
    of Linux's abstract sockets, which a process has alone while it lives. After 1.5 s a server
    goes on without one.
    """
    turns = max(1, (os.cpu_count() or 1) - 1)
    names = [f"\0tfdist {os.getuid()} {number}" for number in range(turns)]
    deadline = time.monotonic() + _LONGEST
    with socket.socket(socket.AF_UNIX) as held:
        while not _has_one(held, names) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield


def _has_one(held: socket.socket, names: Sequence[str]) -> bool:
    for name in names:
        try:
            held.bind(name)
        except OSError:  # Another server has it.
            continue
        return True
    return False
