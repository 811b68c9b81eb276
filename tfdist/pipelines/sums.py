"""Gradients of a chunk, added up over microbatches on the chunk's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._tensorflow import eagerly_outside_of_scope
from tfdist.pipelines.parts import Part
from tfdist.placement.devices import on

__all__ = ["GradientSums"]


class GradientSums:
    """One sum for each weight of a chunk, in place.

    Args:
        part: the chunk.

    Attributes:
        touched: for each weight whether there has ever been a gradient.
    """

    def __init__(self, part: Part) -> None:
        with eagerly_outside_of_scope(), on(part.device):
            self.variables = [
                tf.Variable(tf.zeros(weight.shape, weight.dtype), trainable=False)
                for weight in part.weights
            ]
        self.touched = [False] * len(self.variables)
        self._device = part.device
        self._function = tf.function(_add, autograph=False, reduce_retracing=True)

    def add(self, grads: Sequence[Any]) -> None:
        """Adds a microbatch's gradients, None where a weight has none."""
        present = [i for i, grad in enumerate(grads) if grad is not None]
        for i in present:
            self.touched[i] = True
        if present:
            with on(self._device):
                handles = [self.variables[i].handle for i in present]
                self._function(handles, [tf.convert_to_tensor(grads[i]) for i in present])

    def clear(self) -> None:
        """Begins anew."""
        with on(self._device):
            for variable in self.variables:
                variable.assign(tf.zeros_like(variable))


def _add(handles: Sequence[Any], grads: Sequence[Any]) -> None:
    for handle, grad in zip(handles, grads, strict=True):
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=grad)
