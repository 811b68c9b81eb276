"""The learning rate's factor: for a larger global batch, and for late gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.config.gradient_options import GradientOptions
from tfdist.errors import ConfigError
from tfdist.gradients.reducer import make_variable
from tfdist.types import KerasVariable, Scalar, Strategy, Tensor, Variable

__all__ = ["Rate"]


class Rate:
    """The factor of an update's learning rate.

    A rule multiplies by the examples of an update over those that the rate was chosen for, or by
    the square root of that. The factor grows from 1 in the first updates (Goyal et al. 2017,
    arXiv:1706.02677). The largest batch so far counts, as the last one of an epoch may be smaller.

    Args:
        strategy: the strategy.
        rule: has the kind of scaling.
    """

    def __init__(self, strategy: Strategy, rule: GradientOptions) -> None:
        self._rule = rule
        self._said = rule.lr_rule == "none"
        self._largest: Variable | None = None
        if rule.lr_rule != "none":
            self._largest = make_variable(strategy, "largest_batch", [], tf.int64, shared=True)

    def note_batch(self, total: Tensor | None) -> None:
        """Notes the examples of a batch, in a replica context.

        Args:
            total: examples on all replicas, a scalar; None if they are not known.

        Raises:
            ConfigError: if they are not known and a rule needs them.
        """
        if self._largest is None:
            return
        if total is None:
            raise ConfigError(
                f"lr_rule={self._rule.lr_rule!r} needs the number of examples of a batch, which "
                "only Keras's own steps tell. Train with `fit` or `train_on_batch`, or multiply "
                "the learning rate in the program."
            )
        larger = tf.maximum(self._largest.read_value(), tf.cast(total, tf.int64))
        self._largest.assign(larger)

    def factor(self, iterations: KerasVariable) -> Scalar | None:
        """The factor of the present update, a scalar; None if it is 1.

        Args:
            iterations: the updates before this one.
        """
        rule = self._rule
        factor: Any = 1 / rule.delay if rule.damp and rule.delay > 1 else None
        if self._largest is None:
            return factor
        grown = _grown(rule, tf.cast(self._largest.read_value(), tf.float32))
        if rule.lr_warmup:
            done = tf.cast(iterations + 1, tf.float32) / rule.lr_warmup
            grown = 1 + (grown - 1) * tf.minimum(1.0, done)
        return grown if factor is None else grown * factor

    def news(self) -> str:
        """A notice for the user, once the size of a batch is known; asked after each step."""
        if self._said:
            return ""
        self._said = True
        batch = int(tf.convert_to_tensor(self._largest))
        rule = self._rule
        times = f" in each of {rule.accumulate} batches" if rule.accumulate > 1 else ""
        warmup = f", reached after {rule.lr_warmup} updates" if rule.lr_warmup else ""
        grown = float(_grown(rule, float(batch)))
        return (
            f"the learning rate is multiplied by {grown:.4g} (lr_rule={rule.lr_rule}: {batch} "
            f"examples{times} of an update, base_batch={rule.base_batch}{warmup})"
        )


def _grown(rule: GradientOptions, batch: Scalar) -> Scalar:
    assert rule.base_batch is not None
    ratio = batch * rule.accumulate / rule.base_batch
    return ratio**0.5 if rule.lr_rule == "sqrt" else ratio
