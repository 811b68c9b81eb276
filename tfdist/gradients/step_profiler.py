"""Measures the parts of a step: input, computation, exchange waited for and exchange hidden."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.types import Structure, Tensor

__all__ = ["Marks", "Meter", "Split", "current_marks", "stamp"]

_local = threading.local()

#: Places of a meter's sums.
_STEPS, _STEP, _INPUT, _COMPUTE, _WAITED, _HIDDEN, _SENT, _LAST_END = range(8)


def stamp(values: Sequence[Any]) -> Tensor:
    """The time in seconds at which values are there, a float64 scalar.

    Taken on the host, where an element of each value is looked at, so a device has computed it. It
    is not a stateful operation: TensorFlow would put those of a function one after the other, and
    the end of an exchange would not be seen while gradients are computed.

    Args:
        values: tensors and `IndexedSlices`; none of them a constant, as TensorFlow would take the
            time of one only once.
    """
    flat = [v.values if isinstance(v, tf.IndexedSlices) else v for v in values]
    firsts = [tf.cast(tf.reshape(v, [-1])[:1], tf.float64) for v in flat if v.dtype.is_floating]
    with tf.control_dependencies([v for v in flat if not v.dtype.is_floating]):
        seen = tf.concat([*firsts, tf.zeros([1], tf.float64)], 0)
    return tf.ensure_shape(tf.numpy_function(_now, [seen], tf.float64, stateful=False), [])


def _now(seen: object) -> np.float64:
    del seen
    return np.float64(time.perf_counter())


@dataclasses.dataclass
class Marks:
    """The moments of one replica's step, in seconds.

    Attributes:
        begun: when the step was called.
        fed: when its batch was there.
        computed: when its gradients were there.
        exchanges: for each exchange its bytes, begin and end.
    """

    begun: Tensor
    fed: Tensor
    computed: Tensor | None = None
    exchanges: list[Any] = dataclasses.field(default_factory=list)


def current_marks() -> Marks | None:
    """The marks of the step that the calling replica runs, or None if nothing is measured."""
    return getattr(_local, "marks", None)


@dataclasses.dataclass(frozen=True)
class Split:
    """The parts of the mean step of an epoch, in milliseconds.

    Attributes:
        steps: how many steps there were.
        step: from the end of one step to the end of the next.
        input: waiting for the batch.
        compute: forward and backward pass, with exchanges of their own.
        waited: waiting for an exchange, with nothing else to do.
        hidden: exchange while gradients were computed.
        sent: bytes that a replica of this process sent in a step.
    """

    steps: int
    step: float
    input: float
    compute: float
    waited: float
    hidden: float
    sent: float

    def logs(self) -> dict[str, float]:
        """The figures under the names that they have in `History` and in TensorBoard."""
        return {
            "step_ms": self.step,
            "input_ms": self.input,
            "compute_ms": self.compute,
            "exchange_waited_ms": self.waited,
            "exchange_hidden_ms": self.hidden,
            "sent_bytes_per_step": self.sent,
        }


class Meter:
    """Adds up the parts of the steps of this process's first replica."""

    def __init__(self) -> None:
        with eagerly_outside_of_scope(), tf.device("CPU:0"):
            self._sums = tf.Variable(tf.zeros([8], tf.float64), trainable=False)
        self._seen = np.zeros(8)

    @contextlib.contextmanager
    def step(self, batch: Structure) -> Iterator[None]:
        """Measures the step of the block, in a replica context.

        Args:
            batch: a nest of tensors.
        """
        leaves = tf.nest.flatten(batch, expand_composites=True)
        tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
        marks = Marks(begun=stamp([self._sums.read_value()]), fed=stamp(tensors))
        _local.marks = marks
        try:
            # A busy host would otherwise look at the batch after the gradients.
            with tf.control_dependencies([marks.begun, marks.fed]):
                yield
        finally:
            _local.marks = None
        if marks.computed is not None:
            self._add(marks)

    def _add(self, marks: Marks) -> None:
        with tf.control_dependencies(marks.exchanges):
            end = stamp([self._sums.read_value() * 0])
        sent, waited, hidden = _costs(marks)
        last = self._sums[_LAST_END]
        fed = tf.maximum(marks.fed - marks.begun, 0.0)
        step = end - tf.where(last > 0, last, marks.begun)
        compute = tf.maximum(end - tf.maximum(marks.fed, marks.begun) - waited, 0.0)
        zero = tf.constant(0.0, tf.float64)
        one = tf.constant(1.0, tf.float64)
        self._sums.assign_add(tf.stack([one, step, fed, compute, waited, hidden, sent, zero]))
        self._sums.scatter_nd_update([[_LAST_END]], [end])

    def begin(self) -> None:
        """Starts anew, as at the beginning of an epoch."""
        self._sums.assign(tf.zeros([8], tf.float64))
        self._seen = np.zeros(8)

    def split(self) -> Split | None:
        """The mean step since `begin`; None if there was none."""
        return _mean(self._sums.numpy())

    def latest(self) -> Split | None:
        """The mean step since the last call, or since `begin`; None if there was none."""
        sums = self._sums.numpy()
        latest, self._seen = sums - self._seen, sums
        return _mean(latest)


def _mean(sums: np.ndarray) -> Split | None:
    """The mean of the steps that a meter's sums are of."""
    steps = int(sums[_STEPS])
    if not steps:
        return None
    mean = [float(total) / steps for total in sums]
    return Split(
        steps=steps,
        step=1e3 * mean[_STEP],
        input=1e3 * mean[_INPUT],
        compute=1e3 * mean[_COMPUTE],
        waited=1e3 * mean[_WAITED],
        hidden=1e3 * mean[_HIDDEN],
        sent=mean[_SENT],
    )


def _costs(marks: Marks) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes sent, and the seconds of exchange after and before the gradients were there.

    A second in which two exchanges are under way counts once.
    """
    if not marks.exchanges:
        return (tf.constant(0.0, tf.float64),) * 3
    costs = tf.stack(marks.exchanges)
    waited = hidden = reached = tf.constant(0.0, tf.float64)
    for _, began, ended in map(tf.unstack, tf.unstack(tf.gather(costs, tf.argsort(costs[:, 1])))):
        began = tf.maximum(began, reached)
        idle = tf.maximum(ended - tf.maximum(began, marks.computed), 0.0)
        waited, hidden = waited + idle, hidden + tf.maximum(ended - began - idle, 0.0)
        reached = tf.maximum(reached, ended)
    return tf.reduce_sum(costs[:, 0]), waited, hidden
