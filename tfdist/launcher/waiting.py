"""The line on a terminal that names what a job waits for until it trains.

Tasks write into their records how far they have come; the line names the step of those that are
the furthest behind. It is redrawn in place and taken away before anything else is shown. Without a
terminal there is none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfdist.launcher.output import write_all
from tfdist.launcher.plan import JobPlan
from tfdist.utils import run_record

__all__ = ["ON_THE_WAY", "Waiting", "terminal"]

#: The wait of a task after each kind of line in its record, in this order; before the first of them
#: its Python starts.
ON_THE_WAY: Mapping[str, str] = {
    "imports": "for TensorFlow to start",
    "joins": "to meet the other tasks",
    "task": "for the script, which has not called fit yet",
    "traces": "for the first batch, for which TensorFlow traces the model",
}
_STARTS = "for Python to start"
#: Kinds after which there is nothing to wait for.
_TRAINS = ("steps", "epoch", "served")
_PERIOD = 0.2
_NAMED = 2
_ERASE = b"\r\x1b[K"


def terminal() -> int | None:
    """The file descriptor of standard error, if both outputs are on a terminal; else None."""
    return 2 if os.isatty(1) and os.isatty(2) else None


class Waiting:
    """Draws the line.

    Args:
        fd: the terminal; None draws nothing.
        plan: the job, whose tasks keep records; None if `follow` gives it.
    """

    def __init__(self, fd: int | None, plan: JobPlan | None = None) -> None:
        self._records: dict[str, Path] = {}
        self._fd, self._shown = fd, ""
        if plan is not None:
            self.follow(plan)
        # A note may be shown within another.
        self._lock = threading.RLock()
        self._over = True
        self._drawn = self._midline = self._spoken = False
        self._redrawn = 0.0
        self._begun = time.time()

    def follow(self, plan: JobPlan) -> None:
        """Has the line name the tasks of this plan from the next `begin` on."""
        records = ((str(each.task), each.environ.get("TFDIST_RECORD")) for each in plan.tasks)
        self._records = {name: Path(path) for name, path in records if path}
        self._shown = str(plan.shown)

    def begin(self) -> None:
        """Begins anew: the tasks have been started."""
        self._begun, self._spoken = time.time(), False
        self._over = self._fd is None or not self._records

    def end(self) -> None:
        """Takes the line away for good."""
        self._over = True
        with self.aside():
            pass

    @contextlib.contextmanager
    def aside(self, data: bytes = b"") -> Iterator[None]:
        """Takes the line away while the block writes to the terminal.

        Args:
            data: output of the shown task that the block writes.
        """
        with self._lock:
            self._write(b"")
            if data:
                self._midline = not data.endswith(b"\n")
                self._spoken = self._spoken or not data.startswith(b"tfdist: ")
            yield

    def redraw(self) -> None:
        """Draws the line as it is now, if there is something to wait for; call it often."""
        now = time.time()
        if self._over or now - self._redrawn < _PERIOD:
            return
        self._redrawn = now
        states = {name: self._state(path) for name, path in self._records.items()}
        if states.get(self._shown) in _TRAINS:
            self.end()
            return
        # A program that prints what it does needs no other word until its `fit`.
        if self._spoken and states.get(self._shown) == "task":
            return
        text = f"waiting {_in_words(states)}: {now - self._begun:.0f} s"
        with self._lock:
            if not self._midline:
                self._write(text[: shutil.get_terminal_size().columns - 1].encode())

    def _write(self, text: bytes) -> None:
        """Draws a line in place of the one that is there; an empty one takes it away."""
        if self._fd is None or not (text or self._drawn):
            return
        with contextlib.suppress(OSError):  # The terminal has gone; the job goes on.
            write_all(self._fd, _ERASE + text)
        self._drawn = bool(text)

    def _state(self, path: Path) -> str:
        """The kind of the last line that this start of a task has written; empty before."""
        with contextlib.suppress(OSError):
            for entry in reversed(run_record.read(path)):
                if entry["t"] < self._begun - 1e-3:
                    break
                if entry["kind"] in ON_THE_WAY or entry["kind"] in _TRAINS:
                    return str(entry["kind"])
        return ""


def _in_words(states: Mapping[str, str]) -> str:
    """The wait of the tasks that are the furthest behind."""
    order = ["", *ON_THE_WAY, *_TRAINS]
    least = min(states.values(), key=order.index)
    what = ON_THE_WAY.get(least, _STARTS)
    behind = [name for name, state in states.items() if state == least]
    if len(behind) == len(states):
        return what
    named = ", ".join(behind[:_NAMED])
    more = f" and {len(behind) - _NAMED} more" if len(behind) > _NAMED else ""
    return f"{what} ({named}{more})"
