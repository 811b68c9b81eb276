"""Messages to the user: the logger `tfdist`, which writes to standard error.

A program that wants fewer, or wants them elsewhere, sets a level or a handler as for any logger:
`logging.getLogger("tfdist").setLevel("WARNING")`. A record's attribute `task` is the task of the
job that wrote it, such as `worker 1`, and empty outside of a cluster.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

__all__ = ["log_without", "logger", "name_task", "warn"]

_PACKAGE = str(Path(__file__).parents[1])
#: Packages whose lines a warning never points at, beside Python's own modules.
_LIBRARIES = frozenset({"tfdist", "tensorflow", "keras", "tf_keras", "horovod"})
#: Modules that AutoGraph makes of functions, in files that are gone when somebody reads a warning.
_GENERATED = "__autograph_generated_file"


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


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns, and points at the line of the program that led here.

    That is the innermost one of this thread, such as a line of a `train_step`; or of the main
    thread, which waits in `fit` while replicas are traced on threads of their own.

    Args:
        message: the text.
        category: the warning's class.
    """
    frame = _of_program(sys._getframe(1))
    if frame is None:
        main = threading.main_thread().ident
        frame = _of_program(sys._current_frames().get(main) if main is not None else None)
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _of_program(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from one on outwards that is not of a library."""
    while frame is not None and _is_of_library(frame):
        frame = frame.f_back
    return frame


def _is_of_library(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    known = name in _LIBRARIES or name in sys.stdlib_module_names or name.startswith(_GENERATED)
    return known or frame.f_code.co_filename.startswith(_PACKAGE)  # Such as the task's `__main__`.


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
