"""Synchronised batch statistics with the gradient of the weighted average.

The gradient of an all-reduced sum is the all-reduced sum of the gradients. A replica's loss counts
by its share `w` of the examples, so on replica `s` that gradient is `sum_r w_r u_r / w_s`: the
exchange multiplies by `w_s` again. Stock Keras leaves the shares out, which is exact for even
batches only, and reduces each of the three statistics on its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._keras import tensorflow_nn as nn
from tfdist.keras.hooks import Hook
from tfdist.keras.replica_context import Step, current_step
from tfdist.types import Tensor


def hooks() -> list[Hook]:
    """The seam of Keras's synchronised batch normalization."""
    return [Hook(nn, "_compute_moments_sync", _moments_over_all_replicas)]


def all_reduce_sum(step: Step, values: list[Any]) -> list[Any]:
    """Sums tensors over the replicas in the forward pass of a Keras step, differentiably."""
    if step.even:
        return list(step.sum(values))
    inner = [_scale_gradient(v, step, inverse=True) for v in values]
    sums = step.sum(inner)
    return [_scale_gradient(v, step, inverse=False) for v in sums]


def _scale_gradient(value: Tensor, step: Step, inverse: bool) -> Tensor:
    def identity(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        def grad(upstream: Tensor) -> Tensor:
            share = step.share(upstream.dtype)
            if inverse:
                return tf.math.divide_no_nan(upstream, share)
            return tf.math.multiply_no_nan(upstream, share)

        return tf.identity(x), grad

    return tf.custom_gradient(identity)(value)


def _moments_over_all_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute_moments_sync(
        x: Tensor, axes: Sequence[int], keepdims: bool
    ) -> tuple[Tensor, Tensor]:
        step = current_step()
        if step is None or tf.distribute.get_replica_context() is None:
            return original(x, axes, keepdims)
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
