"""Numbers that steps add up on the first server, in the same transaction as their update.

A step that returned its numbers would cost the chief another round trip. Here they are counted
exactly once, as the update is, and the chief looks at them when somebody wants to know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tensorflow import eagerly_outside_of_scope
from tfdist.servers.lock import Lock

__all__ = ["Counts", "Tally"]

#: Staleness from here on is counted in one.
LONGEST = 256


class Tally:
    """Sums of the numbers of one kind of step.

    Args:
        lock: the lock under which steps add their numbers.
        shapes: shapes of the numbers.
    """

    def __init__(self, lock: Lock, shapes: Sequence[Sequence[int]]) -> None:
        self._lock, self._device = lock, lock.device
        self._take: Any = None
        self._shapes = [tuple(shape) for shape in shapes]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        with tf.init_scope(), eagerly_outside_of_scope(), tf.device(self._device):
            self._sums = tf.Variable(tf.zeros([sum(self._sizes)], tf.float64), trainable=False)

    def pack(self, numbers: Sequence[Any]) -> Any:
        """The numbers as one vector of float32."""
        flat = [tf.reshape(tf.cast(number, tf.float32), [-1]) for number in numbers]
        return tf.concat(flat, 0) if flat else tf.zeros([0])

    def add(self, packed: Any) -> None:
        """Adds packed numbers, on the server."""
        with tf.device(self._device):
            self._sums.assign_add(tf.cast(packed, tf.float64), read_value=False)

    def prepare(self) -> None:
        """Traces what `news` runs."""
        if self._take is None:
            take = tf.function(self._read_and_clear, autograph=False)
            self._take = take.get_concrete_function()

    def news(self) -> list[np.ndarray[Any, Any]]:
        """What was added since the last look, eagerly. The sums start anew, so a NaN does too."""
        self.prepare()
        with tf.device(self._device):
            news = self._take().numpy()
        parts = np.split(news, np.cumsum(self._sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _read_and_clear(self) -> Any:
        held = self._lock.acquire()
        with tf.control_dependencies([held]), tf.device(self._device):
            news = tf.identity(self._sums.read_value())
            with tf.control_dependencies([news]):
                cleared = self._sums.assign(tf.zeros_like(news), read_value=False)
        self._lock.release(held, [cleared])
        return news


class Counts:
    """What became of gradients, as the server that decides counts it.

    Args:
        device: the first server's device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        with tf.device(device):
            self._counts = tf.Variable(tf.zeros([LONGEST + 2], tf.int64), trainable=False)
        self._seen = np.zeros([LONGEST + 2], np.int64)

    def note_applied(self, staleness: Any) -> list[Any]:
        """Ops that count a gradient that is applied, of this staleness."""
        with tf.device(self._device):
            return [self._add(1 + tf.minimum(staleness, LONGEST))]

    def note_dropped(self) -> Any:
        """An op that counts a gradient that is discarded."""
        with tf.device(self._device):
            return self._add(0)

    def news(self) -> tuple[int, list[int]]:
        """Since the last look: gradients dropped, and those applied by staleness."""
        now = self._counts.numpy()
        news, self._seen = now - self._seen, now
        return int(news[0]), [int(count) for count in news[1:]]

    def _add(self, place: Any) -> Any:
        one = tf.constant([1], tf.int64)
        return self._counts.scatter_nd_add(tf.reshape(place, [1, 1]), one)
