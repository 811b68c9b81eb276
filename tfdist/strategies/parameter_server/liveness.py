"""A deadline for what the chief itself asks of the servers, such as the weights of a model.

A step that a server does not answer ends by `step_timeout`. The chief's own reads and writes wait
in C++ code that neither a signal nor an exception ends, for as long as a connection is open: also
to a server that is stopped.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.utils.watchdog import hard_deadline

__all__ = ["watch"]

#: Seconds between two questions to a server, and those that the end of the process waits for one.
_PERIOD, _LAST = 10.0, 2.0


def watch(devices: Sequence[str], seconds: float) -> None:
    """Asks each server now and then; ends the process if one does not answer.

    Args:
        devices: the servers' devices, in their order.
        seconds: how long an answer may take.
    """
    ended = threading.Event()
    threads = [
        threading.Thread(target=_ask, args=(index, device, seconds, ended), daemon=True)
        for index, device in enumerate(devices)
    ]

    def end() -> None:
        # TensorFlow must not come back to a thread of an interpreter that has ended.
        ended.set()
        for thread in threads:
            thread.join(_LAST)

    atexit.register(end)
    for thread in threads:
        thread.start()


def _ask(index: int, device: str, seconds: float, ended: threading.Event) -> None:
    message = (
        f"ps {index} has not answered for step_timeout={seconds:g} s. It is stopped, or cut off: "
        "look at its log. Start the job again, which goes on from its last checkpoint, or give a "
        "larger step_timeout."
    )
    while not ended.wait(min(_PERIOD, seconds)):
        with hard_deadline(seconds, message, TfdistError.exit_status), tf.device(device):
            try:
                tf.raw_ops.NoOp()
            except tf.errors.OpError:
                return  # lost; the next step ends with an error
