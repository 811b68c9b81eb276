"""The exchange of gradients: before the optimizer sees them, so that all of it acts on the average.

Keras all-reduces inside `apply`, after clipping, inside the conditional of gradient accumulation,
and after the check for infinities of dynamic loss scaling. N processes then clip, accumulate and
skip differently from one. Here the average is taken first and everything else is as on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.adam import Adam
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from tfdist.keras import fused
from tfdist.keras.flags import exchanged
from tfdist.keras.hooks import Hook
from tfdist.keras.step import current_step, weighed
from tfdist.keras.updating import step_by_rule
from tfdist.updates.sums import sum_over_replicas
from tfdist.updates.updater import updater_of


def hooks() -> list[Hook]:
    """The seams of Keras's optimizers."""
    return [
        Hook(BaseOptimizer, "apply", _exchange_first),
        Hook(LossScaleOptimizer, "apply", _exchange_first),
        Hook(LossScaleOptimizer, "_tf_apply", _apply_in_replica),
        Hook(LossScaleOptimizer, "scale_loss", _weigh_scaled_loss),
        Hook(TFOptimizer, "_all_reduce_sum_gradients", _skip_if_exchanged),
        Hook(Adam, "update_step", fused.adam_while(exchanged)),
    ]


def exchange(grads: list[Any], optimizer: Any) -> list[Any]:
    """Averages gradients over the replicas, weighted by examples.

    Outside of a Keras step, where a training loop scales its own loss, gradients are summed: the
    meaning that `tf.distribute` gives to `apply_gradients`.

    Args:
        grads: one dense tensor, `IndexedSlices` or None for each weight.
        optimizer: the optimizer that they are for.

    Returns:
        The reduced gradients, None where there was None.
    """
    present = weighed([g for g in grads if g is not None], optimizer)
    if not present:
        return grads
    sum_gradients = getattr(tf.distribute.get_strategy(), "sum_gradients", sum_over_replicas)
    reduced = iter(sum_gradients(present))
    return [None if g is None else next(reduced) for g in grads]


def _exchange_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if exchanged.is_up:
            return original(self, grads, trainable_variables)
        if tf.distribute.in_cross_replica_context():
            return _apply_everywhere(original, self, list(grads), trainable_variables)
        updater = updater_of(self, tf.distribute.get_strategy())
        if updater is not None:
            return step_by_rule(updater, self, list(grads), trainable_variables)
        grads = exchange(list(grads), self)
        with exchanged.up():
            return original(self, grads, trainable_variables)

    return apply


def _apply_everywhere(original: Callable[..., Any], *args: Any) -> Any:
    """Applies gradients of a loop without `Strategy.run`, as one device would.

    Such a loop sees the whole batch on every worker, so its gradients are the same everywhere and
    each replica applies them to its own copy.
    """

    def on_replica() -> None:
        with exchanged.up():
            original(*args)

    tf.distribute.get_strategy().run(on_replica)


def _apply_in_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decides on infinities in the replica: after the exchange all replicas see the same."""

    @functools.wraps(original)
    def tf_apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if exchanged.is_up:
            return self._common_apply(grads, trainable_variables=trainable_variables)
        return original(self, grads, trainable_variables)

    return tf_apply


def _weigh_scaled_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale_loss(self: Any, loss: Any) -> Any:
        step, scaled = current_step(), original(self, loss)
        return scaled if step is None else step.weigh_scaled(scaled, self)

    return scale_loss


def _skip_if_exchanged(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        return list(grads_and_vars) if exchanged.is_up else original(self, grads_and_vars)

    return all_reduce_sum_gradients
