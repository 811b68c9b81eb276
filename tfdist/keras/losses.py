"""Losses inside a Keras step: each replica's own mean, as `step.py` explains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as loss_module
from keras.src.metrics import reduction_metrics

from tfdist.keras.hooks import Hook
from tfdist.keras.step import Step, current_step


def hooks() -> list[Hook]:
    """The seams of Keras's losses and of its mean over scalars."""
    return [
        Hook(loss_module, "scale_loss_for_distribution", _unscaled),
        Hook(loss_module, "unscale_loss_for_distribution", _unscaled),
        Hook(loss_module, "reduce_weighted_values", _reduce_over_all_replicas),
        Hook(reduction_metrics.Mean, "update_state", _weigh_scalars),
    ]


def _unscaled(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Leaves a loss alone in a Keras step, and where a loop computes the whole batch's itself."""

    @functools.wraps(original)
    def scale(value: Any) -> Any:
        whole_batch = tf.distribute.in_cross_replica_context()
        return value if current_step() or whole_batch else original(value)

    return scale


def _reduce_over_all_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    """Corrects the reductions whose mean is not one over the examples."""

    @functools.wraps(original)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = original(values, sample_weight, mask, reduction, dtype)
        step = current_step()
        if step is None or loss.shape.rank != 0 or reduction in (None, "none"):
            return loss
        if reduction == "sum":
            return _divide(loss, step.share(loss.dtype))
        denominator = _denominator(loss, sample_weight, mask, reduction)
        if denominator is None:
            return loss
        return loss * _correction(step, denominator)

    return reduce_weighted_values


def _denominator(loss: Any, sample_weight: Any, mask: Any, reduction: str) -> Any:
    """What a replica divides by, where that is not its number of examples; else None."""
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weights = tf.cast(sample_weight, loss.dtype)
        if mask is not None:
            weights = weights * tf.cast(mask, loss.dtype)
        return tf.reduce_sum(weights)
    if mask is not None:
        return tf.reduce_sum(tf.cast(mask, loss.dtype))
    return None


def _correction(step: Step, denominator: Any) -> Any:
    """Turns a share of the examples into a share of the denominators."""
    denominator = tf.stop_gradient(denominator) * step.present(denominator.dtype)
    total = step.sum(denominator)
    part = tf.math.divide_no_nan(denominator, total)
    return _divide(part, step.share(part.dtype))


def _divide(value: Any, share: Any) -> Any:
    return tf.math.divide_no_nan(value, share)


def _weigh_scalars(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a scalar that a replica tracks count by the replica's share of the batch.

    `self.loss_tracker.update_state(loss)` of a custom `train_step` then has the value it has on one
    device: the mean over the steps of each global batch's mean.
    """

    @functools.wraps(original)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = current_step()
        if step is None or step.even or sample_weight is not None:
            return original(self, values, sample_weight)
        values = keras.ops.convert_to_tensor(values)
        if values.shape.rank != 0:
            return original(self, values)
        return original(self, values, step.share(self.dtype) * step.replicas)

    return update_state
