"""Two tiny programs that see to it that tasks die with their launcher, even by `kill -9`.

`exec`: starts a task. It writes its process group on a pipe and then becomes the task, so that no
task exists that the pipe does not know. `watch`: reads the process groups from that pipe. When
every writer is gone (the launcher has died, and whatever it was starting has been written down) it
ends the groups that were not crossed out.

A file of its own that imports nothing of tfdist: it is run by its path, with `python -I -S`, and
starts in milliseconds. A task's children are in its process group and end with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

__all__ = ["become", "watch"]

_GRACE = 1.0
_LARGEST_GROUP_LINE = 32


def become(pipe: int, command: list[str]) -> None:
    """Writes this process's group on the pipe and turns into the command."""
    line = f"+{os.getpid()}\n".encode()
    assert len(line) < _LARGEST_GROUP_LINE, "short writes on a pipe are never torn"
    with contextlib.suppress(BrokenPipeError):  # Somebody killed the watcher: go unguarded.
        os.write(pipe, line)
    os.close(pipe)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"Cannot start {command[0]!r}: {error.strerror}.", file=sys.stderr)
        os._exit(127)


def watch(pipe: int) -> None:
    """Waits until the launcher has gone, then ends the groups that it left behind."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    with open(pipe, "rb", buffering=0) as stream:
        rest = b""
        while block := stream.read(4096):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                _note(groups, line)
    _end(groups)


def _note(groups: set[int], line: bytes) -> None:
    number = int(line[1:])
    if line.startswith(b"+"):
        groups.add(number)
    else:
        groups.discard(number)


def _end(groups: set[int]) -> None:
    _signal(groups, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    while _signal(groups, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    _signal(groups, signal.SIGKILL)


def _signal(groups: set[int], number: int) -> int:
    """Sends a signal to each group and returns how many of them still have processes."""
    alive = 0
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            alive += 1
    return alive


def _main(arguments: list[str]) -> None:
    role, pipe, *command = arguments
    if role == "watch":
        watch(int(pipe))
    else:
        become(int(pipe), command)


if __name__ == "__main__":
    _main(sys.argv[1:])
