"""The servers' record of updates: how many there were, and which steps they came from.

Every update carries a number of its own. A step whose worker died is done again by another; the
servers then know which of its updates they have applied already, and apply none twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.strategies.parameter_server.serialization import Vector
from tfdist.types import Array, Operation, Tensor, Variable

__all__ = [
    "APPLIED",
    "DROPPED",
    "FORGOTTEN",
    "MADE",
    "WINDOW",
    "Counts",
    "Ledger",
    "Lock",
    "Tally",
]

#: Numbers of updates that are remembered; those under way must lie within.
WINDOW = 4096

#: Fates of an update. One whose number is too old to be remembered is refused: it may have
#: been applied, by whoever took over from a worker that was cut off. A server has `MADE` its own
#: changes of one; the first one notes that it was applied, when all have.
APPLIED, DROPPED, FORGOTTEN, MADE = 1, 2, 3, 4


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
                # Update n has slot n % WINDOW. No update has the number -1: the slot is free.
                self._numbers[device] = _window("numbers", -1)
                self._fates[device] = _window("fates", 0)

    def fate(self, device: str, number: Tensor) -> Tensor:
        """A server's decision on the update of this number: 0 if there is none.

        Numbers rise. A slot is written by numbers that are `WINDOW` apart, so a number has never
        been noted if its slot has an earlier one, and cannot be remembered if it has a later one.
        """
        slot = number % WINDOW
        with tf.device(device):
            there = tf.gather(self._numbers[device], slot)
            known = tf.where(tf.equal(there, number), tf.gather(self._fates[device], slot), 0)
            late = there > number
            # Only the first server decides, so it alone has the floor.
            if device == self.devices[0]:
                late = tf.logical_or(late, tf.less(number, self._floor))
            return tf.where(late, tf.constant(FORGOTTEN, tf.int64), known)

    def refuse_before(self, number: int) -> None:
        """Refuses all updates of smaller numbers from now on, eagerly: nobody waits for them."""
        self._floor.assign(number)

    def note(self, device: str, number: Tensor, fate: Tensor | int) -> list[Any]:
        """Ops that note what a server did with an update."""
        slot = number % WINDOW
        with tf.device(device):
            return [
                _set(self._numbers[device], slot, number),
                _set(self._fates[device], slot, tf.cast(fate, tf.int64)),
            ]


def _window(name: str, value: int) -> Variable:
    return tf.Variable(tf.fill([WINDOW], tf.constant(value, tf.int64)), trainable=False, name=name)


def _set(variable: Variable, slot: Tensor, value: Tensor) -> Variable:
    return variable.scatter_nd_update(tf.reshape(slot, [1, 1]), tf.reshape(value, [1]))


# One lock for all servers: who holds it sees and changes all weights at one moment.
#
# It lives on the first server. Reads of all weights and whole updates are done under it, so that
# a gradient's staleness is a number, and an update is applied as a whole or not at all, on any
# number of servers.


class Lock:
    """A mutex on a server, for use within graphs."""

    def __init__(self, device: str) -> None:
        self.device = device
        with tf.device(device):
            self._handle = tf.raw_ops.MutexV2(shared_name=f"tfdist-{uuid.uuid4().hex}")

    def acquire(self) -> Tensor:
        """An op that ends when the lock is held: what must come after depends on it."""
        with tf.device(self.device):
            return tf.raw_ops.MutexLock(mutex=self._handle)

    def release(self, held: Tensor, after: Sequence[Any]) -> Operation:
        """Gives the lock back when `after` is done.

        A task that dies while it holds the lock gives it back with the end of its step.
        """
        with tf.control_dependencies(list(after)), tf.device(self.device):
            return tf.raw_ops.ConsumeMutexLock(mutex_lock=held)


# Numbers that steps add up on the first server, in the same transaction as their update.
#
# A step that returned its numbers would cost the chief another round trip. Here they are counted
# exactly once, as the update is, and the chief looks at them when somebody wants to know.

#: Staleness from here on is counted in one.
LONGEST = 256


class Tally:
    """Sums of the numbers of one kind of step, which are added under a lock."""

    def __init__(self, lock: Lock, shapes: Sequence[Sequence[int]]) -> None:
        self._lock, self._device = lock, lock.device
        self._layout = Vector(shapes)
        with tf.init_scope(), eagerly_outside_of_scope(), tf.device(self._device):
            self._sums = tf.Variable(tf.zeros([self._layout.size], tf.float64), trainable=False)
            # Traced here: a graph goes to all servers, of which one may be stopped later.
            take = tf.function(self._read_and_clear, autograph=False)
            self._take = take.get_concrete_function()

    def pack(self, numbers: Sequence[Any]) -> Tensor:
        """The numbers as one vector of float32."""
        return self._layout.pack(numbers, tf.float32)

    def add(self, packed: Tensor) -> None:
        """Adds packed numbers, on the server."""
        with tf.device(self._device):
            self._sums.assign_add(tf.cast(packed, tf.float64), read_value=False)

    def drain(self) -> list[Array]:
        """The numbers added since the last call, eagerly. The sums start anew, and a NaN goes."""
        with tf.device(self._device):
            return self._layout.unpack(self._take().numpy())

    def _read_and_clear(self) -> Tensor:
        # Steps add under the same lock, so nothing is added between the read and the clearing.
        held = self._lock.acquire()
        with tf.control_dependencies([held]), tf.device(self._device):
            sums = tf.identity(self._sums.read_value())
            with tf.control_dependencies([sums]):
                cleared = self._sums.assign(tf.zeros_like(sums), read_value=False)
        self._lock.release(held, [cleared])
        return sums


class Counts:
    """The numbers of gradients applied and dropped, as the server that decides counts them."""

    def __init__(self, device: str) -> None:
        self._device = device
        # Index 0 is for gradients that are dropped, index 1 + s for those applied at staleness s.
        with tf.device(device):
            self._counts = tf.Variable(tf.zeros([LONGEST + 2], tf.int64), trainable=False)
        self._seen = np.zeros([LONGEST + 2], np.int64)

    def note_applied(self, staleness: Tensor) -> Variable:
        """An op that counts a gradient that is applied, of this staleness."""
        return self._add(1 + tf.minimum(staleness, LONGEST))

    def note_dropped(self) -> Variable:
        """An op that counts a gradient that is discarded."""
        return self._add(0)

    def drain(self) -> tuple[int, list[int]]:
        """Since the last call: gradients dropped, and those applied by staleness."""
        now = self._counts.numpy()
        new, self._seen = now - self._seen, now
        return int(new[0]), [int(count) for count in new[1:]]

    def _add(self, index: Any) -> Variable:
        with tf.device(self._device):
            one = tf.constant([1], tf.int64)
            return self._counts.scatter_nd_add(tf.reshape(index, [1, 1]), one)
