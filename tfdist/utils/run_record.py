"""Records of a run: lines of JSON that the launcher and each task append beside the logs.

`tfdist report` makes a page of them. Each line is an object with its `kind` and `t`, the time in
seconds since 1970; the other keys belong to the kind. Numbers may be NaN, as Python's `json` writes
them.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

__all__ = ["SUFFIX", "Record", "read"]

#: The ending of a record's name. That of a task has the name of its log otherwise.
SUFFIX = ".jsonl"


class Record:
    """Appends lines to a file. A line that cannot be written is lost, and nothing is raised.

    The first failure ends the record: a training that goes on with a full disk does not try again
    at each step.

    Args:
        path: the file; None keeps nothing.
        fresh: whether to empty the file first.
    """

    def __init__(self, path: Path | None, *, fresh: bool = False) -> None:
        self._file = None
        if path is None:
            return
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "wb" if fresh else "ab", buffering=0)  # noqa: SIM115
        if not fresh:
            self._write(b"\n")  # A task that was killed may have left a part of a line.

    @property
    def is_open(self) -> bool:
        """Whether lines are still written."""
        return self._file is not None

    def add(self, kind: str, **values: Any) -> None:
        """Appends a line.

        Args:
            kind: the event.
            values: its properties. A value that JSON does not know becomes its text.
        """
        if self._file is not None:
            line = json.dumps({"kind": kind, "t": round(time.time(), 3), **values}, default=str)
            self._write(line.encode() + b"\n")

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            complete = self._file.write(data) == len(data)
        except OSError:
            complete = False
        if not complete:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record, oldest first. Lines that are torn or foreign are left out.

    Raises:
        OSError: if the file cannot be read.
    """
    entries = []
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "kind" in entry and isinstance(entry.get("t"), (int, float)):
            entries.append(entry)
    return entries
