"""Synchronised batch statistics with the gradient of the weighted average.

Stock Keras leaves the replicas' shares of the examples out of the gradient (see
`Step.scale_gradient`), which is exact for even batches only, and reduces each of the three
statistics on its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import tensorflow_nn as nn
from tfdist.keras.hooks import Hook
from tfdist.keras.replica_context import Step, current_step, note_exchanged
from tfdist.types import Tensor


def hooks() -> list[Hook]:
    """The seam of Keras's synchronised batch normalization."""
    return [
        Hook(nn, "_compute_moments_sync", _moments_over_all_replicas),
        Hook(keras.layers.BatchNormalization, "_moments", _masked_moments_over_all_replicas),
    ]


def all_reduce_sum(step: Step, values: list[Any]) -> list[Any]:
    """Sums tensors over the replicas in the forward pass of a Keras step, differentiably."""
    if step.even:
        return list(step.sum(values))
    inner = [step.scale_gradient(v, inverse=True) for v in values]
    sums = step.sum(inner)
    return [step.scale_gradient(v) for v in sums]


def _moments_over_all_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras averages the replicas' moments without weighing them by examples."""

    @functools.wraps(original)
    def compute_moments_sync(
        x: Tensor, axes: Sequence[int], keepdims: bool
    ) -> tuple[Tensor, Tensor]:
        step = current_step()
        if step is None or tf.distribute.get_replica_context() is None:
            moments = original(x, axes, keepdims)
            if not tf.executing_eagerly():
                note_exchanged(moments)
            return moments
        count = tf.reduce_sum(tf.ones_like(x), axis=axes, keepdims=True)
        total = tf.reduce_sum(x, axis=axes, keepdims=True)
        squares = tf.reduce_sum(tf.square(x), axis=axes, keepdims=True)
        present = step.present(x.dtype)
        local = [total * present, squares * present, count * present]
        total, squares, count = all_reduce_sum(step, local)
        mean = tf.math.divide_no_nan(total, count)
        variance = tf.math.divide_no_nan(squares, count) - tf.square(mean)
        variance = tf.maximum(variance, 0.0)
        if not keepdims:
            mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
        return mean, variance

    return compute_moments_sync


def _masked_moments_over_all_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras takes the moments of what a mask leaves of a replica's own examples."""

    @functools.wraps(original)
    def moments(
        self: keras.layers.BatchNormalization, inputs: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        step = current_step()
        if step is None or mask is None or not self.synchronized:
            return original(self, inputs, mask)
        kept = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        present = step.present(inputs.dtype)

        def total(values: Tensor) -> Tensor:
            values = tf.where(kept, values, tf.zeros_like(values))
            return tf.reduce_sum(values, self._reduction_axes, keepdims=True) * present

        sums, count = all_reduce_sum(step, [total(inputs), total(tf.ones_like(inputs))])
        count = count + keras.config.epsilon()
        mean = sums / count
        (squares,) = all_reduce_sum(step, [total(tf.square(inputs - mean))])
        return tf.squeeze(mean), tf.squeeze(squares / count)

    return moments
