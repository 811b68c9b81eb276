"""What the servers know about updates: how many there were, and which steps they came from.

Every update carries a number of its own. A step whose worker died is done again by another; the
servers then know which of its updates they have applied already, and apply none twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["APPLIED", "DROPPED", "FORGOTTEN", "WINDOW", "Ledger"]

#: Numbers of updates that are remembered; those under way must lie within.
WINDOW = 4096

#: What became of an update. One whose number is too old to be remembered is refused: it may have
#: been applied, by whoever took over from a worker that was cut off.
APPLIED, DROPPED, FORGOTTEN = 1, 2, 3


class Ledger:
    """State beside the weights.

    Args:
        devices: the servers' devices; the first one counts.

    Attributes:
        version: updates applied so far, int64, on the first server.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = list(devices)
        with tf.device(devices[0]):
            self.version = tf.Variable(0, dtype=tf.int64, trainable=False, name="version")
            self._floor = tf.Variable(0, dtype=tf.int64, trainable=False, name="floor")
        self._numbers, self._fates = {}, {}
        for device in devices:
            with tf.device(device):
                self._numbers[device] = _window("numbers", -1)
                self._fates[device] = _window("fates", 0)

    def fate(self, device: str, number: Any) -> Any:
        """What a server did with the update of this number: 0, `APPLIED`, `DROPPED`, `FORGOTTEN`.

        Numbers rise. A place is written by numbers that are `WINDOW` apart, so a number has never
        been noted if its place has an earlier one, and cannot be remembered if it has a later one.
        """
        slot = number % WINDOW
        with tf.device(device):
            there = tf.gather(self._numbers[device], slot)
            known = tf.where(tf.equal(there, number), tf.gather(self._fates[device], slot), 0)
            late = there > number
            if device == self.devices[0]:
                late = tf.logical_or(late, number < self._floor)
            return tf.where(late, tf.constant(FORGOTTEN, tf.int64), known)

    def refuse_before(self, number: int) -> None:
        """Refuses all updates of smaller numbers from now on, eagerly: nobody waits for them."""
        self._floor.assign(number)

    def note(self, device: str, number: Any, fate: Any) -> list[Any]:
        """Ops that note what a server did with an update."""
        slot = number % WINDOW
        with tf.device(device):
            return [
                _set(self._numbers[device], slot, number),
                _set(self._fates[device], slot, tf.cast(fate, tf.int64)),
            ]


def _window(name: str, value: int) -> Any:
    return tf.Variable(tf.fill([WINDOW], tf.constant(value, tf.int64)), trainable=False, name=name)


def _set(variable: Any, slot: Any, value: Any) -> Any:
    return variable.scatter_nd_update(tf.reshape(slot, [1, 1]), tf.reshape(value, [1]))
