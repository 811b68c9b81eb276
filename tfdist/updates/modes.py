"""When a gradient is applied: at once, some updates later, or to each replica's own weights.

All of it runs in a replica context. `apply` hands gradients to the optimizer, which changes this
replica's copy of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist.updates.reducer import Reducer
from tfdist.updates.rule import GradientRule
from tfdist.updates.variables import make_variable

__all__ = ["Apply", "Late", "Mode", "Sync", "cost_if", "only_if"]

#: Applies gradients, one for each weight.
Apply = Callable[[list[Any]], None]


class Mode(Protocol):
    """What becomes of the gradients of one update.

    Attributes:
        variables: what it keeps from step to step, by name.
        pending: counts what `flush` would do; None where there is never anything.
    """

    variables: dict[str, Any]
    pending: Any

    def update(self, values: list[Any], share: Any, apply: Apply) -> Any:
        """Takes the gradients of one update.

        Args:
            values: this replica's, weighted: their sum over the replicas is the average.
            share: this replica's part of the examples of the update, a scalar.
            apply: applies gradients.

        Returns:
            What the exchange costs; see `Reducer`.
        """

    def flush(self, apply: Apply) -> None:
        """Applies what is pending, so that all replicas hold the same, complete weights."""


def cost_if(condition: Any, then: Callable[[], Any]) -> Any:
    """Runs what exchanges where a condition holds, and returns what it costs; else zeros."""
    return tf.cond(condition, then, lambda: tf.zeros([3], tf.float64))


def only_if(condition: Any, then: Callable[[], Any]) -> None:
    """Runs an action where a condition holds."""

    def run() -> Any:
        then()
        return tf.constant(True)

    tf.cond(condition, run, lambda: tf.constant(False))


class Sync:
    """All replicas' gradients of a step are averaged and applied in that step."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self.variables: dict[str, Any] = {}
        self.pending: Any = None

    def update(self, values: list[Any], share: Any, apply: Apply) -> Any:
        """See `Mode.update`."""
        del share
        sums, cost = self._reducer(values)
        apply(sums)
        return cost

    def flush(self, apply: Apply) -> None:
        """Nothing is ever pending."""


class Late:
    """Gradients are applied some updates after they were computed.

    The gradients of an update are exchanged while the next one's are computed: nothing that is sent
    depends on the forward and backward pass of the same step. With a delay of 2 and more the sums
    wait further, so that a slow network may fall behind for a step and catch up (delayed gradients:
    arXiv:1104.5525; delayed all-reduce: Pipe-SGD, arXiv:1811.03619).

    Args:
        strategy: the strategy.
        reducer: sums gradients.
        rule: says by how many updates, at least 1.
        specs: shapes and types of the gradients, sparse ones as dense.
    """

    def __init__(
        self, strategy: Any, reducer: Reducer, rule: GradientRule, specs: Sequence[tf.TensorSpec]
    ) -> None:
        self._reducer = reducer
        self._delay = rule.delay

        make = functools.partial(make_variable, strategy)
        self._own = [
            make(f"own_{i}", spec.shape, spec.dtype, shared=False) for i, spec in enumerate(specs)
        ]
        self._sums = [
            [
                make(f"sum_{late}_{i}", spec.shape, spec.dtype, shared=True)
                for i, spec in enumerate(specs)
            ]
            for late in range(self._delay - 1)
        ]
        self.pending: Any = make("pending", [], tf.int64, shared=True)
        self.variables: dict[str, Any] = {}  # A checkpoint is written when nothing is pending.

    def update(self, values: list[Any], share: Any, apply: Apply) -> Any:
        """See `Mode.update`."""
        del share
        waiting = self.pending.read_value()
        oldest, newest, cost = self._exchange()
        only_if(waiting >= self._delay, lambda: apply(oldest))
        self._move_up(newest)
        for variable, value in zip(self._own, values, strict=True):
            variable.assign(tf.convert_to_tensor(value))
        self.pending.assign(tf.minimum(waiting + 1, self._delay))
        return cost

    def flush(self, apply: Apply) -> None:
        """See `Mode.flush`: the oldest first."""
        waiting = self.pending.read_value()
        oldest, newest, _ = self._exchange()
        in_order = [oldest, *self._later(newest)]
        for late, sums in enumerate(in_order):
            there = self._delay - late <= waiting
            only_if(there, functools.partial(apply, sums))
        self.pending.assign(tf.constant(0, tf.int64))

    def _exchange(self) -> tuple[list[Any], list[Any], Any]:
        """The oldest sums, the newest, and what these cost."""
        newest, cost = self._reducer([variable.read_value() for variable in self._own])
        oldest = [v.read_value() for v in self._sums[0]] if self._sums else newest
        return oldest, newest, cost

    def _later(self, newest: list[Any]) -> list[list[Any]]:
        """All sums but the oldest, in their order."""
        kept = [[v.read_value() for v in sums] for sums in self._sums[1:]]
        return [*kept, newest] if self._sums else []

    def _move_up(self, newest: list[Any]) -> None:
        for place, sums in zip(self._sums, self._later(newest), strict=False):
            for variable, value in zip(place, sums, strict=True):
                variable.assign(value)
