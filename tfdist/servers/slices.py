"""Sparse gradients of the parts of a batch, collected until all are there.

They stay sparse and keep their repeated indices, as one process's gradient of the whole batch has
them: optimizers such as Adam treat rows without a gradient, and repeated ones, in a way of their
own. Rows that all parts have in common, as those of a position embedding, one process has once: the
parts' are added up. They come first in each part.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["Slices"]


class Slices:
    """A queue of sparse gradients on a server.

    Args:
        device: the server's device.
        dtype: the gradients' type.
    """

    def __init__(self, device: str, dtype: Any) -> None:
        self._device, self._dtype = device, dtype
        with tf.device(device):
            self._queue = tf.queue.FIFOQueue(1 << 20, [dtype, tf.int64, tf.int32])

    def put(self, value: Any, common: Any) -> Any:
        """An op that adds a part's gradient.

        Args:
            value: `IndexedSlices`.
            common: how many of its first rows all parts have, int32.
        """
        with tf.device(self._device):
            return self._queue.enqueue([value.values, tf.cast(value.indices, tf.int64), common])

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
            # The same graph made all parts: they have the same rows in common, in the same order.
            common = tf.ensure_shape(taken[0][2], [])
            rows = [tf.add_n([value[:common] for value in values])]
            rows += [value[common:] for value in values]
            places = [indices[0][:common], *(each[common:] for each in indices)]
            return tf.IndexedSlices(tf.concat(rows, 0), tf.concat(places, 0), tf.constant(shape))

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
