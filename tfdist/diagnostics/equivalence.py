"""Compares the training of N processes with that of one process. No TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Comparison", "Observations", "Row", "compare", "read"]


@dataclasses.dataclass(frozen=True)
class Observations:
    """The observations of one task.

    Attributes:
        logs: for each step, the logs that callbacks saw.
        weights: for each step, sampled elements of each weight by path.
        examples: a digest of every example that the task's replicas were given, in order.
        notes: layers that train differently on N replicas by their nature.
    """

    logs: Sequence[Mapping[str, float]]
    weights: Sequence[Mapping[str, Sequence[float]]]
    examples: Sequence[int]
    notes: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Row:
    """One training step side by side.

    Attributes:
        step: its number, from 1.
        one: the loss that one process reported.
        many: the loss that worker 0 of N reported.
        spread: largest difference between the losses of the N workers.
        weight_difference: largest difference of any sampled weight element.
        where: the weight that differs most.
    """

    step: int
    one: float
    many: float
    spread: float
    weight_difference: float
    where: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of a verification.

    Attributes:
        rows: the steps.
        tolerance: the largest difference of a weight.
        examples_one: examples that one process trained on.
        examples_many: examples that the N processes trained on, together.
        missing: examples that one process saw and the N did not, counted as often as they were.
        repeated: examples that the N processes saw more often than one process did.
        notes: explanations to look at first.
    """

    rows: tuple[Row, ...]
    tolerance: float
    examples_one: int
    examples_many: int
    missing: int
    repeated: int
    notes: tuple[str, ...]

    @property
    def first_difference(self) -> Row | None:
        """The first step that differs by more than the tolerance, or None."""
        return next((row for row in self.rows if self._differs(row)), None)

    @property
    def ok(self) -> bool:
        """Whether N processes trained what one process trained, on the same examples."""
        covered = not self.missing and not self.repeated
        return bool(self.rows) and covered and self.first_difference is None

    def _differs(self, row: Row) -> bool:
        loss = max(abs(row.one - row.many), row.spread)
        bound = self.tolerance * max(1.0, abs(row.one)) * 10
        return not (row.weight_difference <= self.tolerance and loss <= bound)


def read(path: Path) -> Observations:
    """Reads the record of a task."""
    return Observations(**json.loads(path.read_text()))


def compare(one: Observations, many: Sequence[Observations], tolerance: float) -> Comparison:
    """Compares one process's observations with those of N workers.

    Args:
        one: of the single process.
        many: of each worker, in the order of their ranks.
        tolerance: the largest difference of a weight.
    """
    steps = min(len(one.logs), *(len(o.logs) for o in many))
    rows = tuple(_row(i, one, many) for i in range(steps))
    seen_one = Counter(one.examples)
    seen_many = Counter(digest for o in many for digest in o.examples)
    return Comparison(
        rows=rows,
        tolerance=tolerance,
        examples_one=seen_one.total(),
        examples_many=seen_many.total(),
        missing=(seen_one - seen_many).total(),
        repeated=(seen_many - seen_one).total(),
        notes=tuple(many[0].notes),
    )


def _row(index: int, one: Observations, many: Sequence[Observations]) -> Row:
    losses = [o.logs[index].get("loss", math.nan) for o in many]
    difference, where = _largest_difference(one.weights[index], [o.weights[index] for o in many])
    return Row(
        step=index + 1,
        one=one.logs[index].get("loss", math.nan),
        many=losses[0],
        spread=max(losses) - min(losses),
        weight_difference=difference,
        where=where,
    )


def _largest_difference(
    one: Mapping[str, Sequence[float]], many: Sequence[Mapping[str, Sequence[float]]]
) -> tuple[float, str]:
    worst, where = 0.0, ""
    for path, values in one.items():
        for weights in many:
            others = weights.get(path)
            if others is None or len(others) != len(values):
                return math.inf, f"{path} (missing or of another size)"
            for a, b in zip(values, others, strict=True):
                gap = abs(a - b) if math.isfinite(a - b) else math.inf
                if gap > worst:
                    worst, where = gap, path
    return worst, where
