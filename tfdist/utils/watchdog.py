"""A last resort for waits that cannot be interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator

from tfdist.utils.messages import logger


@contextlib.contextmanager
def calling_after(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Calls a function, on a thread of its own, if the block takes longer.

    Args:
        seconds: how long the block may take.
        action: called then, once.
    """
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def hard_deadline(seconds: float, message: str, exit_status: int) -> Iterator[None]:
    """Ends the process if the block takes longer.

    TensorFlow waits for its peers in C++ code that neither a signal nor an exception ends
    (tensorflow#53098), so after the deadline the process reports the reason and exits at once.

    Args:
        seconds: how long the block may take.
        message: the event that it waited for, and the action to take.
        exit_status: the status to exit with.
    """

    def end() -> None:
        logger.error(message)
        os._exit(exit_status)

    with calling_after(seconds, end):
        yield


@contextlib.contextmanager
def outside_deadline(seconds: float, message: str) -> Iterator[None]:
    """Ends the process if the block takes longer, also if no other thread of it can run.

    TensorFlow holds Python's global lock while it registers a graph with its peers, so another
    process watches the time. It ends with this one, whose number may be another process's then.

    Args:
        seconds: how long the block may take.
        message: the event that it waited for, and the action to take.
    """
    # This process holds the other end of the pipe that is read, which is closed when it ends.
    script = 'timeout "$1" cat; [ $? = 124 ] && echo "tfdist: $2" >&2 && kill -KILL "$3"'
    arguments = (f"{seconds:f}", message, str(os.getpid()))
    watcher = subprocess.Popen(
        ["sh", "-c", script, "sh", *arguments], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        os.killpg(watcher.pid, signal.SIGKILL)
        watcher.communicate()
