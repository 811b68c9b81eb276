"""The gradient exchange: what stands between computed gradients and the optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.graphs import fresh_zeros
from tfdist.config.gradient_options import GradientOptions
from tfdist.gradients.modes import Apply, Late, Local, Mode, Sync, cost_if, only_if
from tfdist.gradients.reducer import Reducer, check_floating, make_variable
from tfdist.types import Strategy, Tensor

__all__ = ["Exchange"]


class Exchange:
    """The gradients of one set of weights: added up, reduced and applied by a rule.

    Accumulation comes first, then the mode, which reduces by way of the compression. `step` and
    `flush` run in a replica context, in the same order on all replicas.

    Args:
        strategy: has `sum_gradients(list)`, `link()` and `num_replicas_in_sync`.
        rule: what to do.
        weights: TensorFlow's variables that the gradients are of.
        specs: shapes and types of the gradients, sparse ones as dense.
        dense: indices of gradients that are not sparse.
        extras: see `Local`.

    Raises:
        ConfigError: if a gradient does not go with the rule.
    """

    def __init__(
        self,
        strategy: Strategy,
        rule: GradientOptions,
        weights: Sequence[Any],
        specs: Sequence[tf.TensorSpec],
        dense: Sequence[int],
        extras: Callable[[], Sequence[Any]],
    ) -> None:
        names = [weight.name for weight in weights]
        if rule.mode != "sync":
            check_floating(f"mode={rule.mode!r}", "choose mode='sync'", specs, names)
        if rule.accumulate > 1:
            what = f"accumulate={rule.accumulate}"
            check_floating(what, "leave accumulate out", specs, names)
        self._rule = rule
        self._strategy = strategy
        self._specs = list(specs)
        kept_sparse = rule.mode == "sync" and rule.accumulate == 1
        indices = dense if kept_sparse else range(len(specs))
        self._reducer = Reducer(strategy, rule, specs, names, indices)
        self._mode = self._make_mode(weights, extras)
        self._sums: dict[str, Any] = {}
        if rule.accumulate > 1:
            self._sums = self._make_sums()

    def _make_mode(self, weights: Sequence[Any], extras: Callable[[], Sequence[Any]]) -> Mode:
        rule, strategy, reducer = self._rule, self._strategy, self._reducer
        if rule.periodic:
            return Local(strategy, reducer, rule, weights, extras)
        if rule.delay:
            return Late(strategy, reducer, rule, self._specs)
        return Sync(reducer)

    def _make_sums(self) -> dict[str, Any]:
        make = functools.partial(make_variable, self._strategy)
        sums = {
            f"sum_{i}": make(f"sum_{i}", spec.shape, spec.dtype, shared=False)
            for i, spec in enumerate(self._specs)
        }
        return {
            **sums,
            "own_examples": make("own_examples", [], tf.float32, shared=False),
            "examples": make("examples", [], tf.float32, shared=True),
            "batches": make("batches", [], tf.int64, shared=True),
        }

    def step(self, values: Sequence[Any], count: Tensor, total: Tensor, apply: Apply) -> Tensor:
        """Takes the gradients of one batch.

        Args:
            values: this replica's, weighted by `count / total`.
            count: this replica's examples, a scalar.
            total: the examples of the batch on all replicas, a scalar.
            apply: applies gradients, one for each weight.

        Returns:
            What its exchange costs; see `Reducer`.
        """
        count, total = tf.cast(count, tf.float32), tf.cast(total, tf.float32)
        if not self._sums:
            share = tf.math.divide_no_nan(count, total)
            return self._mode.update(list(values), share, apply)
        self._add(values, count, total)
        taken = self._sums["batches"].assign_add(tf.constant(1, tf.int64), read_value=True)
        return cost_if(taken >= self._rule.accumulate, lambda: self._update(apply))

    def flush(self, apply: Apply, *, batches: bool, late: bool) -> None:
        """Applies pending updates.

        Args:
            apply: applies gradients, one for each weight.
            batches: make an update of fewer batches than the rule adds up.
            late: apply gradients that wait, and average weights that differ.
        """
        if self._sums and batches:
            taken = self._sums["batches"].read_value()
            only_if(taken > 0, lambda: self._update(apply))
        if self._mode.pending is not None and late:
            self._mode.flush(apply)

    def pending(self, *, batches: bool, late: bool) -> bool:
        """Whether `flush` has something to do; the same on all replicas, asked outside of them."""
        counts = [self._mode.pending] if late and self._mode.pending is not None else []
        if batches and self._sums:
            counts.append(self._sums["batches"])
        return any(int(tf.convert_to_tensor(count)) for count in counts)

    def saved(self) -> dict[str, Any]:
        """The values that belong into a checkpoint, by name. Asked outside of the replicas."""
        begun = self._sums and int(tf.convert_to_tensor(self._sums["batches"])) > 0
        return {**self._kept(), **(self._sums if begun else {})}

    def _kept(self) -> dict[str, Any]:
        return {**self._reducer.variables, **self._mode.variables}

    def _add(self, values: Sequence[Any], count: Tensor, total: Tensor) -> None:
        for i, value in enumerate(values):
            dense = tf.convert_to_tensor(value)
            self._sums[f"sum_{i}"].assign_add(dense * tf.cast(total, dense.dtype))
        self._sums["own_examples"].assign_add(count)
        self._sums["examples"].assign_add(total)

    def _update(self, apply: Apply) -> Tensor:
        """Makes an update of the batches that were added up."""
        examples = self._sums["examples"].read_value()
        values = [
            self._sums[f"sum_{i}"].read_value() / tf.cast(examples, spec.dtype)
            for i, spec in enumerate(self._specs)
        ]
        share = self._sums["own_examples"].read_value() / examples
        cost = self._mode.update(values, share, apply)
        for variable in self._sums.values():
            variable.assign(fresh_zeros(variable))
        return cost

    def restore(self, arrays: dict[str, Any]) -> None:
        """Puts the values of a checkpoint back; each replica takes its part of its own ones."""
        for name, variable in {**self._kept(), **self._sums}.items():
            if name in arrays and tuple(variable.shape) == np.shape(arrays[name]):
                variable.assign(tf.cast(arrays[name], variable.dtype))
