"""Messages to the user: the logger `tfdist`, which writes to standard error.

A program that wants fewer, or wants them elsewhere, sets a level or a handler as for any logger:
`logging.getLogger("tfdist").setLevel("WARNING")`. A record's attribute `task` is the task of the
job that wrote it, such as `worker 1`, and empty outside of a cluster.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

__all__ = ["log_without", "logger", "name_task"]


class _ToStandardError(logging.Handler):
    """Writes to what `sys.stderr` is at that moment, as notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record as a line that begins with `tfdist:`."""
        try:
            print(f"tfdist: {self.format(record)}", file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class _Task(logging.Filter):
    """Adds the task to each record."""

    task = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps the record."""
        record.task = self.task
        return True


_task = _Task()

logger = logging.getLogger("tfdist")
logger.addFilter(_task)
if not logger.handlers:
    logger.addHandler(_ToStandardError())
    logger.propagate = False
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def name_task(task: str) -> None:
    """Gives the records from now on the name of this process's task."""
    _task.task = task


@contextlib.contextmanager
def log_without(unwanted: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Keeps messages that TensorFlow's Python code logs within a block out of its log.

    Args:
        unwanted: whether a record is left out.
    """

    def kept(record: logging.LogRecord) -> bool:
        return not unwanted(record)

    tensorflow = logging.getLogger("tensorflow")
    tensorflow.addFilter(kept)
    try:
        yield
    finally:
        tensorflow.removeFilter(kept)
