"""When a gradient is applied: at once, some updates later, or to each replica's own weights.

All of it runs in a replica context. `apply` hands gradients to the optimizer, which changes this
replica's copy of the weights.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.config.gradient_options import GradientOptions
from tfdist.gradients.reducer import Reducer, make_variable
from tfdist.types import Gradient, Strategy, Tensor

__all__ = ["Apply", "Late", "Local", "Mode", "Sync", "cost_if", "only_if"]

#: Applies gradients, one for each weight.
Apply = Callable[[list[Any]], None]


class Mode(ABC):
    """The treatment of the gradients of one update.

    Attributes:
        variables: its state between steps, by name.
        pending: counts the updates that `flush` would make; None if there are never any.
    """

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}
        self.pending: Any = None

    @abstractmethod
    def update(self, values: list[Any], share: Tensor, apply: Apply) -> Tensor:
        """Takes the gradients of one update.

        Args:
            values: this replica's, weighted: their sum over the replicas is the average.
            share: this replica's part of the examples of the update, a scalar.
            apply: applies gradients.

        Returns:
            What the exchange costs; see `Reducer`.
        """

    def flush(self, apply: Apply) -> None:
        """Applies pending updates, so that all replicas hold the same, complete weights."""
        del apply


def cost_if(condition: Tensor, then: Callable[[], Any]) -> Tensor:
    """Runs an exchange if a condition holds, and returns its cost; else zeros."""
    return tf.cond(condition, then, lambda: tf.zeros([3], tf.float64))


def only_if(condition: Tensor, then: Callable[[], Any]) -> None:
    """Runs an action if a condition holds."""

    def run() -> Tensor:
        then()
        return tf.constant(True)

    tf.cond(condition, run, lambda: tf.constant(False))


class Sync(Mode):
    """All replicas' gradients of a step are averaged and applied in that step."""

    def __init__(self, reducer: Reducer) -> None:
        super().__init__()
        self._reducer = reducer

    def update(self, values: list[Any], share: Tensor, apply: Apply) -> Tensor:
        """See `Mode.update`."""
        del share
        sums, cost = self._reducer(values)
        apply(sums)
        return cost


class Late(Mode):
    """Gradients are applied some updates after they were computed.

    The gradients of an update are exchanged while the next one's are computed: nothing that is sent
    depends on the forward and backward pass of the same step. With a delay of 2 and more the sums
    wait further, so that a slow network may fall behind for a step and catch up (delayed gradients:
    arXiv:1104.5525; delayed all-reduce: Pipe-SGD, arXiv:1811.03619).

    Args:
        strategy: the strategy.
        reducer: sums gradients.
        rule: has the number of updates, at least 1.
        specs: shapes and types of the gradients, sparse ones as dense.
    """

    def __init__(
        self,
        strategy: Strategy,
        reducer: Reducer,
        rule: GradientOptions,
        specs: Sequence[tf.TensorSpec],
    ) -> None:
        super().__init__()
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
        # Of this no variable is saved: a checkpoint is written when nothing is pending.
        self.pending = make("pending", [], tf.int64, shared=True)

    def update(self, values: list[Any], share: Tensor, apply: Apply) -> Tensor:
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
        """The oldest sums, the newest, and the cost of these."""
        newest, cost = self._reducer([variable.read_value() for variable in self._own])
        oldest = [v.read_value() for v in self._sums[0]] if self._sums else newest
        return oldest, newest, cost

    def _later(self, newest: list[Any]) -> list[list[Any]]:
        """All sums but the oldest, in their order."""
        kept = [[v.read_value() for v in sums] for sums in self._sums[1:]]
        return [*kept, newest] if self._sums else []

    def _move_up(self, newest: list[Any]) -> None:
        for variables, sums in zip(self._sums, self._later(newest), strict=False):
            for variable, value in zip(variables, sums, strict=True):
                variable.assign(value)


class Local(Mode):
    """Each replica applies its own gradients; every `period` updates the weights are averaged.

    The change of the weights since the last average is exchanged, each replica's weighted
    by its examples. So it can be compressed like a gradient, and an outer optimizer can act on it:
    SGD with Nesterov momentum, as in DiLoCo (arXiv:2311.08105). With factor 1 and without momentum
    the new weights are the average: local SGD (arXiv:1805.09767), and with synchronous steps before
    it post-local SGD (arXiv:1808.07217).

    Args:
        strategy: the strategy.
        reducer: sums gradients, or changes of weights.
        rule: has the period.
        weights: TensorFlow's variables.
        extras: names further variables, such as moving averages of layers, that each replica
            changes by itself; they are averaged as they are. Asked for when the average is traced.
    """

    def __init__(
        self,
        strategy: Strategy,
        reducer: Reducer,
        rule: GradientOptions,
        weights: Sequence[Any],
        extras: Callable[[], Sequence[Any]],
    ) -> None:
        super().__init__()
        self._strategy = strategy
        self._reducer = reducer
        self._rule = rule
        self._weights = list(weights)
        self._extras = extras
        make = functools.partial(make_variable, strategy, shared=True)
        self._before = [make(f"before_{i}", w.shape, w.dtype) for i, w in enumerate(weights)]
        self._share = make("share", [], tf.float32, shared=False)
        self.pending = make("pending", [], tf.int64)
        if rule.sync_steps:
            self.variables["synchronous"] = make("synchronous", [], tf.int64)
        if rule.outer_momentum:
            self.variables.update(
                (f"momentum_{i}", make(f"momentum_{i}", w.shape, w.dtype))
                for i, w in enumerate(weights)
            )

    def update(self, values: list[Any], share: Tensor, apply: Apply) -> Tensor:
        """See `Mode.update`."""

        def alone() -> Tensor:
            return self._alone(values, share, apply)

        done = self.variables.get("synchronous")
        if done is None:
            return alone()

        def together() -> Tensor:
            done.assign_add(tf.constant(1, tf.int64))
            cost = Sync(self._reducer).update(values, share, apply)
            self._average_extras(share)
            return cost

        return tf.cond(done.read_value() < self._rule.sync_steps, together, alone)

    def flush(self, apply: Apply) -> None:
        """See `Mode.flush`: the weights are averaged, after however many steps."""
        del apply
        cost_if(self.pending.read_value() > 0, self._average)

    def _alone(self, values: list[Any], share: Tensor, apply: Apply) -> Tensor:
        taken = self.pending.read_value()
        only_if(tf.equal(taken, 0), self._remember)
        share = tf.cast(share, tf.float32)
        apply([_divided(value, share) for value in values])
        self._share.assign_add(share)
        self.pending.assign_add(tf.constant(1, tf.int64))
        return cost_if(taken + 1 >= self._rule.period, self._average)

    def _remember(self) -> None:
        for before, weight in zip(self._before, self._weights, strict=True):
            before.assign(weight.read_value())

    def _average(self) -> Tensor:
        """Averages the weights; returns the cost."""
        part = self._share.read_value() / tf.cast(self.pending.read_value(), tf.float32)
        before = [variable.read_value() for variable in self._before]
        changes = [
            (old - weight.read_value()) * tf.cast(part, old.dtype)
            for old, weight in zip(before, self._weights, strict=True)
        ]
        sums, cost = self._reducer(changes)
        for i, (old, change) in enumerate(zip(before, sums, strict=True)):
            self._weights[i].assign(old - self._outer(i, change))
        self._average_extras(part)
        self._share.assign(tf.constant(0.0))
        self.pending.assign(tf.constant(0, tf.int64))
        return cost

    def _average_extras(self, part: Tensor) -> None:
        extras = [v for v in self._extras() if v.dtype.is_floating]
        weighed = [v.read_value() * tf.cast(part, v.dtype) for v in extras]
        for variable, value in zip(extras, self._strategy.link().sum(weighed), strict=True):
            variable.assign(value)

    def _outer(self, number: int, change: Tensor) -> Tensor:
        """The outer optimizer's result for an averaged change."""
        momentum = self._rule.outer_momentum
        if momentum:
            kept = self.variables[f"momentum_{number}"]
            moved = kept.read_value() * momentum + change
            kept.assign(moved)
            change = change + momentum * moved
        return change * self._rule.outer_lr


def _divided(value: Gradient, share: Tensor) -> Gradient:
    """A replica's own mean gradient; zeros if it has no examples."""
    if isinstance(value, tf.IndexedSlices):
        own = tf.math.divide_no_nan(value.values, tf.cast(share, value.dtype))
        return tf.IndexedSlices(own, value.indices, value.dense_shape)
    return tf.math.divide_no_nan(value, tf.cast(share, value.dtype))
