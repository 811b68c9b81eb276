"""Some values of gradients only, drawn at random in each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.updates.compression.base import Memory, all_finite, error_memory, unless_broken
from tfdist.updates.compression.layout import Layout
from tfdist.updates.compression.top_values import part_of, poisoned

if TYPE_CHECKING:
    from tfdist.updates.link import Link

__all__ = ["RandomValues"]

_SEED = 20180915


@dataclasses.dataclass(frozen=True)
class RandomValues:
    """All replicas send the values at the same random positions of all tensors together.

    What is not sent is fed back (random-k of arXiv:1809.07599). Positions need not travel: it sends
    8 (p - 1) / p `ratio` bytes a float32 value. The values lie in rows of about 1 / `ratio`; a step
    sends one of each row, with equal chances and independent of other rows. In a turn of as many
    steps every value is sent once, in an order that is drawn for each turn: none waits for two
    turns.

    Attributes:
        ratio: the part of all values that is sent in a step, at least one value.
    """

    ratio: float

    def memory(self, specs: Sequence[tf.TensorSpec], replicas: int) -> list[Memory]:
        """See `Compression.memory`."""
        del replicas
        layout = Layout.of(specs)
        rows, steps = self._rows(layout.length)
        return [
            error_memory(rows * steps, layout.dtype),
            Memory("counter", (), tf.int64, True, lambda: tf.zeros([], tf.int64)),
        ]

    def __call__(
        self, link: Link, values: Sequence[Any], memory: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """See `Compression`."""
        layout = Layout.of(values)
        if not layout.length:
            return list(values), list(memory)
        rows, steps = self._rows(layout.length)
        error, counter = memory
        corrected = layout.join(values, length=rows * steps) + error
        corrected = tf.reshape(corrected, [rows, steps])
        columns = _drawn(counter, rows, steps)
        chosen = tf.gather(corrected, columns, batch_dims=1)
        (sums,) = link.sum([poisoned(chosen, all_finite(corrected))])
        # Masks cost as much for any ratio; scattering costs as much only up to a ratio of 0.01.
        mask = tf.one_hot(columns, steps, True, False, dtype=tf.bool)
        zero = tf.zeros([], layout.dtype)
        total = tf.reshape(tf.where(mask, sums[:, None], zero), [-1])
        left = tf.reshape(tf.where(mask, zero, corrected), [-1])
        kept = unless_broken(all_finite(sums), [left, counter + 1], memory)
        return layout.split(total), kept

    def _rows(self, length: int) -> tuple[int, int]:
        """The rows and their length, by which they have zeros at the end."""
        if not length:
            return 0, 0
        steps = -(-length // part_of(length, self.ratio))
        return -(-length // steps), steps


def _drawn(counter: Any, rows: int, steps: int) -> Any:
    """The column of each row in one step: int32 of shape `(rows,)`.

    In each of `steps` steps it is another one, moved by the same for all rows.
    """
    step, turn = tf.cast(counter % steps, tf.int32), tf.cast(counter // steps, tf.int32)
    seed = tf.stack([_SEED, turn])
    # A named algorithm, for it to be the same on all devices.
    first = tf.random.stateless_uniform([rows], seed, 0, steps, tf.int32, alg="philox")
    return (first + tf.random.experimental.index_shuffle(step, seed, steps - 1)) % steps
