"""Layers called as functions: their assignments are results, and change nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.types import KerasVariable, Tensor

__all__ = ["Assigning"]


class Assigning(keras.StatelessScope):  # type: ignore[misc]
    """Collects the assignments within it, and the losses that are added.

    A variable has no gradient to the value that it was given, so neither has the value that stands
    for it: Keras's own scope would pass on the gradient of a moving mean to the examples.

    Args:
        pairs: Keras's variables, each with the value that it has within.

        initialize: whether variables that are made within get their first values at the end.

    Attributes:
        assigned: the variables that were assigned, by `id`.
    """

    def __init__(self, pairs: list[tuple[Any, Any]], *, initialize: bool = True) -> None:
        super().__init__(pairs, collect_losses=True, initialize_variables=initialize)
        self.assigned: dict[int, KerasVariable] = {}

    def add_update(self, update: tuple[KerasVariable, Tensor]) -> None:
        """Notes the value that a variable is given."""
        variable, value = update
        self.assigned[id(variable)] = variable
        super().add_update((variable, tf.stop_gradient(value)))

    def others(self, known: Iterable[KerasVariable]) -> list[KerasVariable]:
        """The assigned variables that are not among some, in the order of their assignments."""
        held = {id(variable) for variable in known}
        return [variable for key, variable in self.assigned.items() if key not in held]
