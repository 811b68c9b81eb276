"""When a step may start, so that no gradient becomes staler than a bound. Pure.

The updates that may come between a step's read and its own update are those of the steps that were
under way when it started, and of those that start before it ends. A step starts only if that
number stays within the bound for it and for every step that is under way. Fast workers wait for
slow ones just as long as this takes, and no work is thrown away (stale synchronous parallel, Ho et
al. 2013, with the bound counted in updates).
"""

from __future__ import annotations

from typing import Any

__all__ = ["Gate", "gate_of"]


class Gate:
    """Admits steps.

    Args:
        bound: most updates between a step's read and its update; None admits every step.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._overlapping: dict[int, int] = {}
        self._updates: dict[int, int] = {}

    @property
    def under_way(self) -> int:
        """Steps that have started and not ended."""
        return len(self._overlapping)

    def may_start(self, updates: int = 1) -> bool:
        """Whether a step that makes that many updates may start now."""
        if self._bound is None or not self._overlapping:
            return True
        most = max(self._overlapping.values()) + updates
        return max(most, sum(self._updates.values())) <= self._bound

    def start(self, step: int, updates: int = 1) -> None:
        """Notes the start of a step. One that starts again, on another worker, counts once."""
        if step in self._overlapping:
            return
        for other in self._overlapping:
            self._overlapping[other] += updates
        self._overlapping[step] = sum(self._updates.values())
        self._updates[step] = updates

    def has_started(self, step: int) -> bool:
        """Whether a step has started and not ended."""
        return step in self._overlapping

    def end(self, step: int) -> None:
        """Notes the end of a step."""
        self._overlapping.pop(step, None)
        self._updates.pop(step, None)


def gate_of(rule: Any) -> Gate:
    """The gate that keeps an update rule's bound."""
    waits = rule.mode == "stale" and rule.on_stale == "wait"
    return Gate(rule.staleness if waits else None)
