"""A last resort for waits that cannot be interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from tfdist.utils.messages import logger

#: The last words of a process that `outside_deadline` ends, which are followed by SIGKILL.
ENDED = "This process was ended for that."

#: Seconds between two looks at the main thread.
_LOOK_EVERY = 2.0


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
    arguments = (f"{seconds:f}", f"{message} {ENDED}", str(os.getpid()))
    watcher = subprocess.Popen(
        ["sh", "-c", script, "sh", *arguments], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        os.killpg(watcher.pid, signal.SIGKILL)
        watcher.communicate()


def end_if_stuck(seconds: float, message: Callable[[], str], possible: Callable[[], bool]) -> None:
    """Ends the process if its main thread stays in one call of TensorFlow.

    For calls that wait for other processes without a deadline. To be run on another thread; it
    returns when the main thread can no longer be stuck.

    Args:
        seconds: how long the call may take.
        message: makes the line that names the event, and the action to take.
        possible: whether such a call may still wait.
    """
    pause = min(_LOOK_EVERY, seconds / 4)
    while possible():
        place = _call_of_tensorflow()
        # Some of these calls hold Python's global lock, so that this thread stands still too.
        with outside_deadline(seconds, message()):
            time.sleep(pause)
            while possible() and place is not None and _call_of_tensorflow() == place:
                time.sleep(pause)


def _call_of_tensorflow() -> tuple[FrameType, int] | None:
    """The call that the main thread makes if that is TensorFlow's: a frame and its instruction."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or f"{os.sep}tensorflow{os.sep}" not in frame.f_code.co_filename:
        return None
    return frame, frame.f_lasti
