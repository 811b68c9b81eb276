"""Where the threads of a pipeline leave tensors for each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from typing import Any

from tfdist.errors import TfdistError

__all__ = ["Board", "OutOfMemoryError", "PipelineError", "StoppedError"]


class PipelineError(TfdistError):
    """A stage failed, or did not answer in time."""


class OutOfMemoryError(PipelineError):
    """A device has too little memory for its stage."""


class StoppedError(Exception):
    """Another thread has failed: there is nothing to wait for."""


class Board:
    """Values by key: put once, taken once, waited for with a deadline.

    Args:
        seconds: how long a thread waits for a value.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: dict[Hashable, Any] = {}
        self._changed = threading.Condition()
        self.error: BaseException | None = None

    def put(self, key: Hashable, value: Any) -> None:
        """Leaves a value."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def take(self, key: Hashable, waiting: str) -> Any:
        """Takes a value, as soon as it is there.

        Args:
            key: under which it is left.
            waiting: who waits for what, for the error.

        Raises:
            PipelineError: if it does not come in time.
            StoppedError: if another thread has failed.
        """
        end = time.monotonic() + self._seconds
        with self._changed:
            while key not in self._values:
                if self.error is not None:
                    raise StoppedError
                left = end - time.monotonic()
                if left <= 0:
                    raise PipelineError(
                        f"{waiting} did not come within {self._seconds:.0f} s. A device of the "
                        "pipeline hangs, or is much slower than the others: see its task's log."
                    )
                self._changed.wait(left)
            return self._values.pop(key)

    def fail(self, error: BaseException) -> None:
        """Stops all threads that wait; the first error counts."""
        with self._changed:
            if self.error is None and not isinstance(error, StoppedError):
                self.error = error
            self._changed.notify_all()

    def clear(self) -> None:
        """Forgets all values, and the error."""
        with self._changed:
            self._values.clear()
            self.error = None
