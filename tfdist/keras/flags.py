"""What a thread is doing, for hooks that act differently meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Flag(threading.local):
    """Up within a block, on the thread that runs it.

    Attributes:
        is_up: whether the calling thread is in such a block.
    """

    is_up = False

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Raises the flag in a block."""
        before = self.is_up
        self.is_up = True
        try:
            yield
        finally:
            self.is_up = before


#: Up where gradients are applied that have been exchanged already.
exchanged = Flag()

#: Up while `fit` runs, in which all workers make the same calls.
fitting = Flag()

#: Up where a tape is asked for gradients of weights by tensors that stand for them.
of_weights = Flag()
