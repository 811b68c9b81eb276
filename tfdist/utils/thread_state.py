"""Values that hold on one thread, while it runs a block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Current", "Flag"]

T = TypeVar("T")


class Current(threading.local, Generic[T]):
    """A value that another takes the place of within a block, on the thread that runs it.

    Args:
        value: the value outside of any block.

    Attributes:
        value: the calling thread's.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    @contextlib.contextmanager
    def set(self, value: T) -> Iterator[None]:
        """Sets the value in a block."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


class Flag(Current[bool]):
    """Up within a block, on the thread that runs it."""

    def __init__(self) -> None:
        super().__init__(False)

    @property
    def is_up(self) -> bool:
        """Whether the calling thread is in such a block."""
        return self.value

    def up(self) -> contextlib.AbstractContextManager[None]:
        """Raises the flag in a block."""
        return self.set(True)
