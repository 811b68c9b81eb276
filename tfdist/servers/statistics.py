"""What became of gradients: counts that the servers' answers are added up to."""

from __future__ import annotations

import collections
import dataclasses
import time

__all__ = ["Statistics"]


@dataclasses.dataclass
class Statistics:
    """Counts since the last `reset`.

    Attributes:
        staleness: for each staleness how many gradients of it were applied.
        applied: gradients that were applied.
        dropped: gradients that were discarded.
        steps: for each worker how many steps it finished.
    """

    staleness: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    applied: int = 0
    dropped: int = 0
    steps: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    updates: int = 0
    _since: float = dataclasses.field(default_factory=time.monotonic)

    def reset(self) -> None:
        """Starts from zero."""
        self.__init__()  # type: ignore[misc]

    @property
    def mean(self) -> float:
        """Mean staleness of the gradients that were applied."""
        total = sum(self.staleness.values())
        return sum(value * n for value, n in self.staleness.items()) / total if total else 0.0

    @property
    def maximum(self) -> int:
        """Largest staleness of a gradient that was applied."""
        return max(self.staleness, default=0)

    @property
    def updates_per_second(self) -> float:
        """Updates for each second since the reset."""
        return self.updates / max(time.monotonic() - self._since, 1e-9)

    def histogram(self) -> list[int]:
        """Gradients applied by staleness, from 0 to the maximum."""
        return [self.staleness[value] for value in range(self.maximum + 1)]
