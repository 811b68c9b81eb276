"""A last resort for waits that cannot be interrupted."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def hard_deadline(seconds: float, message: str, exit_status: int) -> Iterator[None]:
    """Ends the process if the block takes longer.

    TensorFlow waits for its peers in C++ code that neither a signal nor an exception ends
    (tensorflow#53098), so after the deadline the process says why and exits at once.

    Args:
        seconds: how long the block may take.
        message: what it waited for, and what to do.
        exit_status: the status to exit with.
    """

    def end() -> None:
        print(f"tfdist: {message}", file=sys.stderr, flush=True)
        os._exit(exit_status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
