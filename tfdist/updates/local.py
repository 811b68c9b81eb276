"""Local steps: each replica trains its own weights, which are averaged now and then."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.updates.modes import Apply, Sync, cost_if, only_if
from tfdist.updates.reducer import Reducer
from tfdist.updates.rule import GradientRule
from tfdist.updates.variables import make_variable

__all__ = ["Local"]


class Local:
    """Each replica applies its own gradients; every `period` updates the weights are averaged.

    What is exchanged is the change of the weights since the last average, each replica's weighted
    by its examples. So it can be compressed like a gradient, and an outer optimizer can act on it:
    SGD with Nesterov momentum, as in DiLoCo (arXiv:2311.08105). With factor 1 and without momentum
    the new weights are the average: local SGD (arXiv:1805.09767), and with synchronous steps before
    it post-local SGD (arXiv:1808.07217).

    Args:
        strategy: the strategy.
        reducer: sums gradients, or changes of weights.
        rule: says when.
        weights: TensorFlow's variables.
        extras: names further variables, such as moving averages of layers, that each replica
            changes by itself; they are averaged as they are. Asked for when the average is traced.
    """

    def __init__(
        self,
        strategy: Any,
        reducer: Reducer,
        rule: GradientRule,
        weights: Sequence[Any],
        extras: Callable[[], Sequence[Any]],
    ) -> None:
        self._strategy = strategy
        self._reducer = reducer
        self._rule = rule
        self._weights = list(weights)
        self._extras = extras

        make = functools.partial(make_variable, strategy, shared=True)
        self._before = [make(f"before_{i}", w.shape, w.dtype) for i, w in enumerate(weights)]
        self._share = make("share", [], tf.float32, shared=False)
        self.pending: Any = make("pending", [], tf.int64)
        self.variables: dict[str, Any] = {}
        if rule.sync_steps:
            self.variables["synchronous"] = make("synchronous", [], tf.int64)
        if rule.outer_momentum:
            self.variables.update(
                (f"momentum_{i}", make(f"momentum_{i}", w.shape, w.dtype))
                for i, w in enumerate(weights)
            )

    def update(self, values: list[Any], share: Any, apply: Apply) -> Any:
        """See `Mode.update`."""

        def alone() -> Any:
            return self._alone(values, share, apply)

        done = self.variables.get("synchronous")
        if done is None:
            return alone()

        def together() -> Any:
            done.assign_add(tf.constant(1, tf.int64))
            cost = Sync(self._reducer).update(values, share, apply)
            self._average_extras(share)
            return cost

        return tf.cond(done.read_value() < self._rule.sync_steps, together, alone)

    def flush(self, apply: Apply) -> None:
        """See `Mode.flush`: the weights are averaged, after however many steps."""
        del apply
        cost_if(self.pending.read_value() > 0, self._average)

    def _alone(self, values: list[Any], share: Any, apply: Apply) -> Any:
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

    def _average(self) -> Any:
        """Averages the weights; returns what it costs."""
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

    def _average_extras(self, part: Any) -> None:
        extras = [v for v in self._extras() if v.dtype.is_floating]
        weighed = [v.read_value() * tf.cast(part, v.dtype) for v in extras]
        for variable, value in zip(extras, self._strategy.link().sum(weighed), strict=True):
            variable.assign(value)

    def _outer(self, number: int, change: Any) -> Any:
        """What the outer optimizer makes of an averaged change."""
        momentum = self._rule.outer_momentum
        if momentum:
            kept = self.variables[f"momentum_{number}"]
            moved = kept.read_value() * momentum + change
            kept.assign(moved)
            change = change + momentum * moved
        return change * self._rule.outer_lr


def _divided(value: Any, share: Any) -> Any:
    """A replica's own mean gradient; zeros where it has no examples."""
    if isinstance(value, tf.IndexedSlices):
        own = tf.math.divide_no_nan(value.values, tf.cast(share, value.dtype))
        return tf.IndexedSlices(own, value.indices, value.dense_shape)
    return tf.math.divide_no_nan(value, tf.cast(share, value.dtype))
