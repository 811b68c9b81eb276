"""Sparse gradients of the parts of a batch, collected until all are there.

They stay sparse and keep their repeated indices, as one process's gradient of the whole batch has
them: optimizers such as Adam treat rows without a gradient, and repeated ones, in a way of their
own. Where all parts have the very same indices, as for a position embedding, one process has each
of them once, so the parts are added.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["Slices", "fingerprint"]


class Slices:
    """A queue of sparse gradients on a server.

    Args:
        device: the server's device.
        dtype: the gradients' type.
    """

    def __init__(self, device: str, dtype: Any) -> None:
        self._device, self._dtype = device, dtype
        with tf.device(device):
            self._queue = tf.queue.FIFOQueue(1 << 20, [dtype, tf.int64, tf.int64])

    def put(self, value: Any, mark: Any) -> Any:
        """An op that adds a part's gradient.

        Args:
            value: `IndexedSlices`.
            mark: the fingerprint of its indices.
        """
        with tf.device(self._device):
            return self._queue.enqueue([value.values, tf.cast(value.indices, tf.int64), mark])

    def take(self, parts: int, shape: list[int]) -> Any:
        """Takes the gradients of that many parts out, as one `IndexedSlices`.

        Args:
            parts: how many are there.
            shape: the variable's shape.
        """
        with tf.device(self._device):
            taken = [self._queue.dequeue() for _ in range(parts)]
            values = [tf.ensure_shape(each[0], [None, *shape[1:]]) for each in taken]
            indices = [tf.ensure_shape(each[1], [None]) for each in taken]
            marks = [tf.ensure_shape(each[2], [2]) for each in taken]
            same = tf.reduce_all(tf.stack([tf.reduce_all(m == marks[0]) for m in marks]))
            rows = tf.cond(same, lambda: tf.add_n(values), lambda: tf.concat(values, 0))
            places = tf.cond(same, lambda: indices[0], lambda: tf.concat(indices, 0))
            return tf.IndexedSlices(rows, places, tf.constant(shape))

    def clear(self) -> None:
        """Takes everything out, eagerly."""
        with tf.device(self._device):
            for _ in range(int(self._queue.size().numpy())):
                self._queue.dequeue()

    def nothing(self, shape: list[int]) -> Any:
        """`IndexedSlices` without rows.

        Args:
            shape: the variable's shape.
        """
        with tf.device(self._device):
            rows, places = tf.zeros([0, *shape[1:]], self._dtype), tf.zeros([0], tf.int64)
            return tf.IndexedSlices(rows, places, tf.constant(shape))


def fingerprint(indices: Any) -> Any:
    """Two numbers that differ for different lists of indices, but for rare accidents."""
    wide = tf.cast(indices, tf.int64)
    weights = tf.range(1, tf.size(wide, tf.int64) + 1) * 2654435761
    return tf.stack([tf.size(wide, tf.int64), tf.reduce_sum((wide + 1) * weights)])
