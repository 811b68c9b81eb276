"""Sums of gradients that were computed in float16, as one device has them."""

from __future__ import annotations

import math

import tensorflow as tf

from tfdist.types import Gradient, Tensor

__all__ = ["as_of_halves", "is_of_halves"]


def is_of_halves(gradient: Gradient) -> bool:
    """Whether a dense gradient was computed in float16, and cast to its weight's type then."""
    if tf.executing_eagerly() or not isinstance(gradient, tf.Tensor):
        return False
    op = gradient.op
    return bool(op.type == "Cast" and op.inputs[0].dtype == tf.float16)


def as_of_halves(total: Tensor) -> Tensor:
    """The sum of the replicas' gradients of halves: infinite where float16 has no such number.

    On one device that sum is computed in float16, and an infinity makes the loss scale smaller.
    """
    # From 65520 on, the middle between the largest number and the next, a number rounds up.
    return tf.where(tf.abs(total) < 65520.0, total, total * tf.constant(math.inf, total.dtype))
