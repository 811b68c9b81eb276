"""Python's stacks in the output of a task whose native code has crashed. Pure functions.

Each task runs with PYTHONFAULTHANDLER=1: if it gets a fatal signal such as SIGSEGV, Python
prints the stacks of all its threads. The crash is in native code, such as TensorFlow's, but what
the user can change is the line of the program that called it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["site", "without_stacks"]

_BEGIN = "Fatal Python error: "
_THREAD = re.compile(r"(?P<current>Current t|T)hread 0x[0-9a-f]+ .*\(most recent call first\):$")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_REST = re.compile(r"$|  <no Python frame>$|  \.\.\.$|Extension modules: ")

#: Files that are not part of the user's program: installed packages, Python's own, and tfdist.
_PACKAGE = str(Path(__file__).parents[2])
_NOT_THE_USERS = re.compile(
    rf"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<|^{re.escape(_PACKAGE)}/"
)


def without_stacks(lines: Sequence[str]) -> list[str]:
    """The lines of a task's output without the stacks that Python prints at a crash."""
    kept, crashed = [], False
    for line in lines:
        crashed = crashed or line.startswith(_BEGIN)
        if not (crashed and any(form.match(line) for form in (_THREAD, _FRAME, _REST))):
            kept.append(line)
    return kept


def site(lines: Sequence[str]) -> str | None:
    """The line of the user's program at which a task has crashed, in words.

    Args:
        lines: the last lines of its output.

    Returns:
        A sentence; None if there was no crash, or its stacks show no line of the program.
    """
    starts = [number for number, line in enumerate(lines) if line.startswith(_BEGIN)]
    if not starts:
        return None
    own: list[re.Match[str]] = []
    latest: list[re.Match[str]] = []
    stack = latest
    for line in lines[starts[-1] :]:
        thread = _THREAD.match(line)
        if thread is not None:
            # Python lists the threads from the youngest to the main one.
            stack = latest = []
            if thread["current"] == "Current t":
                own = stack
        frame = _FRAME.match(line)
        if frame is not None and not _NOT_THE_USERS.search(frame["file"]):
            stack.append(frame)
    if own:
        return f"The crash is in native code, which was called by {_place(own[0])}."
    if latest:
        return f"The crash is in another thread, while the program was at {_place(latest[0])}."
    return None


def _place(frame: re.Match[str]) -> str:
    return f"line {frame['line']} of {frame['file']}, in {frame['name']}"
