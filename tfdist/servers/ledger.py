"""What the servers know about updates: how many there were, and which steps they came from.

Every update carries a number of its own. A step whose worker died is done again by another; the
servers then know which of its updates they have applied already, and apply none twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["APPLIED", "DROPPED", "WINDOW", "Ledger"]

#: Numbers of updates that are remembered; those in flight must lie within.
WINDOW = 4096

#: What became of an update.
APPLIED, DROPPED = 1, 2


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
        self._numbers, self._fates = {}, {}
        for device in devices:
            with tf.device(device):
                self._numbers[device] = _window("numbers", -1)
                self._fates[device] = _window("fates", 0)

    def fate(self, device: str, number: Any) -> Any:
        """What a server did with the update of this number: 0, `APPLIED` or `DROPPED`."""
        slot = number % WINDOW
        with tf.device(device):
            known = tf.equal(tf.gather(self._numbers[device], slot), number)
            return tf.where(known, tf.gather(self._fates[device], slot), 0)

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
