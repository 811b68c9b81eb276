"""The progress of `fit`, for the record of this task.

A line for each epoch, one for the first step, and some between: about one a second, fewer in long
runs. Nothing here waits for another task.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import Any

from tfdist import types
from tfdist.gradients.step_profiler import Split
from tfdist.keras import feeding
from tfdist.types import Logs
from tfdist.utils.run_record import Record

__all__ = ["Progress", "begin", "current"]

#: Seconds between two lines at least, and the number of lines after which they become rarer: a run
#: that is ten times as long then has few more.
_PERIOD, _LINES = 1.0, 1000.0

#: The mark of a list of callbacks that has begun an epoch.
_SEEN = "_tfdist_progress"


class Progress:
    """Writes lines to a record as the callbacks of `fit` are called.

    Args:
        record: where they go.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._begun = self._last = self._epoch_begun = self._step_ended = time.monotonic()
        self._fit, self._epoch = -1, 0
        self._begins = self._done = self._noted = 0
        self._first = self._first_of_epoch = True
        self._files: set[str] = set()

    def epoch_begins(self, callbacks: types.CallbackList, epoch: int) -> None:
        """Starts the clock of an epoch."""
        if not vars(callbacks).setdefault(_SEEN, False):
            vars(callbacks)[_SEEN] = True
            self._fit, self._first = self._fit + 1, True
            self._record.add("traces")
        now = time.monotonic()
        self._epoch, self._first_of_epoch = epoch, True
        self._begins = self._done = self._noted = 0
        self._epoch_begun = self._step_ended = self._last = now

    def batch_ends(
        self,
        callbacks: types.CallbackList,
        batch: int,
        logs: Logs | None,
        measured: Callable[[], Split | None],
    ) -> None:
        """Writes a line if the last one is long enough ago.

        Args:
            callbacks: those of the `fit`.
            batch: the number of the last step, from 0.
            logs: the logs of the epoch so far.
            measured: returns the parts of the steps since its last call, if they are measured.
        """
        if self._first_of_epoch:
            # A `fit` that resumes begins within an epoch.
            calls = getattr(getattr(callbacks, "_model", None), "steps_per_execution", 1)
            self._begins = self._noted = max(0, batch + 1 - calls)
            self._first_of_epoch = False
        self._step_ended = now = time.monotonic()
        self._done = batch + 1
        period = max(_PERIOD, (now - self._begun) / _LINES)
        if not self._first and now - self._last < period:
            return
        steps, seconds = self._done - self._noted, now - self._last
        more = {"first": True} if self._first else {}
        split = measured()
        parts = {} if split is None else {"parts": split.logs()}
        self._first, self._noted, self._last = False, self._done, now
        self._add(
            "steps", step=self._done, steps=steps, seconds=seconds, logs=logs, **more, **parts
        )

    def epoch_ends(self, logs: Logs | None) -> None:
        """Writes the line of an epoch. Its seconds end with its last step, before a validation."""
        seconds = self._step_ended - self._epoch_begun
        self._add("epoch", steps=self._done - self._begins, seconds=seconds, logs=logs)

    def wrote(self, path: str) -> None:
        """Writes a line for a file of the program's, the first time that it is written."""
        if path not in self._files:
            self._files.add(path)
            self._record.add("file", path=os.path.abspath(path))

    def add(self, kind: str, **values: Any) -> None:
        """Writes a line of a strategy's own, of the present epoch."""
        self._record.add(kind, fit=self._fit, epoch=self._epoch, **values)

    def _add(self, kind: str, *, seconds: float, logs: Logs | None, **values: Any) -> None:
        if self._record.is_open:
            self.add(
                kind,
                seconds=round(seconds, 6),
                batch=feeding.global_batch(),
                peak_rss=peak_rss(),
                logs=_numbers(logs),
                **values,
            )


_current: list[Progress] = []


def begin(record: Record) -> None:
    """Writes the progress of this process to a record from now on."""
    _current[:] = [Progress(record)]


def current() -> Progress | None:
    """The progress of this process; None if it has no record."""
    return _current[0] if _current else None


def peak_rss() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _numbers(logs: Logs | None) -> dict[str, float]:
    """The logs that are numbers."""
    found = {}
    for name, value in (logs or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            continue
    return found
