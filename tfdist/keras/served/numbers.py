"""The numbers of finished steps on their way into Keras's metrics and logs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist.keras.served.graph import TracedStep

__all__ = ["Numbers"]


class Numbers:
    """Adds up what steps return or have added up on the servers.

    They are kept in NumPy, where adding costs little, and go to the metrics' variables when these
    are looked at.

    Attributes:
        latest: the kind of step whose numbers came last.
    """

    def __init__(self) -> None:
        self.latest: TracedStep
        self._step = -1
        self._scalars: list[Any] = []
        self._sums: dict[int, tuple[Any, np.ndarray[Any, Any]]] = {}

    @property
    def pending(self) -> bool:
        """Whether there are numbers that the metrics do not have yet."""
        return bool(self._sums)

    def add(self, traced: TracedStep, step: int, numbers: list[Any]) -> None:
        """Adds what one step has returned.

        Args:
            traced: the kind of step.
            step: its number; scalars are those of the last step.
            numbers: as `TracedStep` orders them.
        """
        if step > self._step:
            self._step, self.latest = step, traced
            self._scalars = numbers[: traced.scalars]
        self._add_metrics(traced, numbers)

    def take(self, traced: TracedStep, numbers: list[Any]) -> None:
        """Adds the sums of several steps; scalars are means over these.

        Args:
            traced: the kind of step.
            numbers: as `TracedStep` orders them.
        """
        steps = float(numbers[traced.scalars])
        if steps <= 0:
            return
        self.latest = traced
        self._scalars = [number / steps for number in numbers[: traced.scalars]]
        self._add_metrics(traced, numbers)

    def flush(self) -> list[Any]:
        """Brings the metrics' variables up to date, and returns the latest scalars."""
        for variable, value in self._sums.values():
            variable._value.assign_add(value.astype(variable._value.dtype.as_numpy_dtype))
        self._sums.clear()
        return self._scalars

    def _add_metrics(self, traced: TracedStep, numbers: list[Any]) -> None:
        for variable, value in zip(traced.metrics, numbers[traced.scalars + 1 :], strict=True):
            known = self._sums.get(id(variable))
            self._sums[id(variable)] = (variable, value if known is None else known[1] + value)
