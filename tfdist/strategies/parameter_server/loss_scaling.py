"""Loss scales on servers: a gradient is unscaled by the scale that its loss was multiplied with.

Other updates may change the scale between a step's read of it and the step's own update. Keras
divides by the scale that it finds then, and takes the initial one, as a constant of the graph,
while the optimizer has no variables yet.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist._keras import LossScaleOptimizer
from tfdist.keras.hooks import Hook
from tfdist.strategies.parameter_server.remote_step import (
    ServedStep,
    TraceAgain,
    current_served_step,
)
from tfdist.types import Gradient, LossScaler, Optimizer, Tensor

__all__ = ["hooks", "rescaled", "scale_of", "unscaling"]

_local = threading.local()


def hooks() -> list[Hook]:
    """The seams at which Keras scales a loss, and takes the scale back after an overflow."""
    return [
        Hook(LossScaleOptimizer, "scale_loss", _noted),
        Hook(LossScaleOptimizer, "_stateful_handle_non_finite_grads", _halved),
    ]


def scale_of(optimizer: Optimizer, step: ServedStep | None) -> Tensor | None:
    """The scale of the loss whose gradients an optimizer is given in a step; None if it has none.

    Raises:
        TraceAgain: if the loss was scaled before the optimizer had its variables.
    """
    if step is None or id(optimizer) not in step.scales:
        return None
    scale = step.scales[id(optimizer)]
    if scale is None:
        raise TraceAgain
    return scale


@contextlib.contextmanager
def unscaling(scale: Tensor | None) -> Iterator[None]:
    """Lets an overflow in the block halve `scale`, not what others have made of it meanwhile."""
    before = getattr(_local, "scale", None)
    _local.scale = scale
    try:
        yield
    finally:
        _local.scale = before


def rescaled(optimizer: Any, scale: Tensor | None, grads: list[Any]) -> list[Any]:
    """Gradients as if their loss had been scaled by the divisor that the optimizer will use.

    Scales are powers of two unless the program starts from another number: nothing is rounded.
    """
    if scale is None:
        return grads
    factor = tf.convert_to_tensor(optimizer.dynamic_scale) / scale
    return [_times(grad, factor) for grad in grads]


def _times(grad: Gradient, factor: Tensor) -> Gradient:
    if isinstance(grad, tf.IndexedSlices):
        values = grad.values * tf.cast(factor, grad.values.dtype)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """A late gradient is divided by the scale that its loss was multiplied by."""

    @functools.wraps(original)
    def scale_loss(self: LossScaler, loss: Tensor) -> Tensor:
        step = current_served_step()
        if step is not None:
            scale = tf.convert_to_tensor(self.dynamic_scale) if self.built else None
            step.scales[id(self)] = scale
        return original(self, loss)

    return scale_loss


def _halved(original: Callable[..., None]) -> Callable[..., None]:
    """Steps that were under way together and all overflow halve the scale once."""

    @functools.wraps(original)
    def handle_non_finite_grads(self: LossScaler) -> None:
        scale = getattr(_local, "scale", None)
        if scale is None:
            return original(self)
        self.step_counter.assign(0)
        now = tf.convert_to_tensor(self.dynamic_scale)
        self.dynamic_scale.assign(tf.minimum(now, scale * 0.5))

    return handle_non_finite_grads
