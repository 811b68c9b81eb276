"""Makes a task slower by stopping it most of the time.

SIGSTOP and SIGCONT in turns, rather than a CPU quota: they need no root and no control group (whose
files differ between versions 1 and 2), they work the same in a namespace, and the task is slowed
whatever it does: computing, sending, or sleeping in Python, where a quota slows only what uses CPU.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

__all__ = ["slowed"]

#: One turn of running and standing still. Many times a scheduler's slice, a fraction of a second.
PERIOD_SECONDS = 0.04
_JOIN_SECONDS = 5.0


@contextlib.contextmanager
def slowed(process: int, factor: float) -> Iterator[None]:
    """Lets a child process run for only 1/factor of the time while the block lasts.

    Args:
        process: its id. It must be a child that is not waited for in the block, so that the id
            stays its own.
        factor: how many times slower; 1 leaves it alone.
    """
    if factor <= 1:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_turns, args=(process, factor, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_JOIN_SECONDS)


def _turns(process: int, factor: float, done: threading.Event) -> None:
    running = PERIOD_SECONDS / factor
    with contextlib.suppress(ProcessLookupError):
        while not done.wait(running):
            os.kill(process, signal.SIGSTOP)
            done.wait(PERIOD_SECONDS - running)
            os.kill(process, signal.SIGCONT)
