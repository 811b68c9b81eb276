"""One lock for all servers: who holds it sees and changes all weights at one moment.

It lives on the first server. Reads of all weights and whole updates are done under it, so that a
gradient's staleness is a number, and an update is applied as a whole or not at all, on any number
of servers.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Lock"]


class Lock:
    """A mutex on a server, for use within graphs.

    Args:
        device: the server's device.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        with tf.device(device):
            self._handle = tf.raw_ops.MutexV2(shared_name=f"tfdist-{uuid.uuid4().hex}")

    def acquire(self) -> Any:
        """An op that ends when the lock is held: what must come after depends on it."""
        with tf.device(self.device):
            return tf.raw_ops.MutexLock(mutex=self._handle)

    def release(self, held: Any, after: Sequence[Any]) -> Any:
        """Gives the lock back when `after` is done.

        A task that dies while it holds the lock gives it back with the end of its step.
        """
        with tf.control_dependencies(list(after)), tf.device(self.device):
            return tf.raw_ops.ConsumeMutexLock(mutex_lock=held)
