"""Gradients of a chunk, added up over microbatches on the chunk's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.placement.devices import on
from tfdist.strategies.pipeline.stage import Part
from tfdist.types import Gradient

__all__ = ["GradientSums"]


class GradientSums:
    """One sum for each weight of a chunk, in place.

    The first gradient after `clear` takes the place of what was there before, so that nothing is
    set to zero. Gradients of some rows of a weight, an embedding's, are put one after the other:
    some of Keras's optimizers, such as Adam, and its clipping by the global norm do something else
    with rows that come several times than with their sum.

    Args:
        part: the chunk.

    Attributes:
        touched: for each weight whether there has ever been a dense gradient.
        rows: for each weight, the values and numbers of a microbatch's own rows, and of those that
            all microbatches look up, since `clear`.
    """

    def __init__(self, part: Part) -> None:
        with eagerly_outside_of_scope(), on(part.device):
            self.variables = [
                tf.Variable(tf.zeros(weight.shape, weight.dtype), trainable=False)
                for weight in part.weights
            ]
        self.touched = [False] * len(self.variables)
        self._device = part.device
        self.clear()

    def begin(self, numbers: Sequence[int]) -> bool:
        """Notes that dense gradients of some weights are going to be added.

        Returns:
            Whether they replace what is there: none has been added since `clear`, of any weight.
        """
        first = not any(self._written)
        for number in numbers:
            if not first and not self._written[number]:
                self._set_to_zero(number)
            self._written[number] = self.touched[number] = True
        return first

    def add(self, number: int, grad: Gradient, *, first: bool) -> None:
        """Adds a gradient, in a graph.

        Args:
            number: of the weight.
            grad: a dense tensor.
            first: whether it replaces the sum of before.
        """
        variable = self.variables[number]
        (variable.assign if first else variable.assign_add)(grad, read_value=False)

    def clear(self) -> None:
        """Begins anew."""
        self._written = [False] * len(self.variables)
        self.rows: list[list[tuple[Any, ...]]] = [[] for _ in self.variables]

    def settle(self) -> None:
        """Sets to zero what has had no gradient since `clear`, so that all sums can be read."""
        for number, touched in enumerate(self.touched):
            if touched and not self._written[number]:
                self._set_to_zero(number)

    def _set_to_zero(self, number: int) -> None:
        with on(self._device):
            variable = self.variables[number]
            variable.assign(tf.zeros(variable.shape, variable.dtype))
