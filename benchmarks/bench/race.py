"""The rules that `slow_worker.py` compares, and what a run of one says."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.job import Job
from bench.lines import read_lines
from bench.run import Measurement

__all__ = ["RULES", "SLOWED", "Rule", "Run", "load", "median_of", "runs_of"]

#: The task that is slowed.
SLOWED = "worker-1"


@dataclasses.dataclass(frozen=True)
class Rule:
    """When a gradient becomes an update.

    Attributes:
        title: for the table and the legend.
        options: fields of `tfdist.config.StrategyConfig`.
    """

    title: str
    options: Mapping[str, Any]


RULES: dict[str, Rule] = {
    "sync": Rule("sync", {"mode": "sync"}),
    "backup": Rule("sync, 1 backup worker", {"mode": "sync", "backup_workers": 1}),
    "async": Rule("async", {"mode": "async"}),
    "stale": Rule("stale, s = 4, wait", {"mode": "stale", "staleness": 4, "on_stale": "wait"}),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A training under a rule.

    Attributes:
        rule: a key of `RULES`.
        measurement: what was measured.
    """

    rule: str
    measurement: Measurement

    @property
    def clock(self) -> list[float]:
        """Seconds of training at the end of each epoch; the first is 0, before the first step."""
        return list(self.measurement.extra["clock"])

    @property
    def losses(self) -> list[float]:
        """The held-out loss at those times."""
        return list(self.measurement.extra["losses"])

    @property
    def seconds(self) -> float:
        """When the loss was reached; NaN if it was not."""
        return self._reached(self.clock)

    @property
    def updates(self) -> float:
        """How many updates that took."""
        return self._reached(self.measurement.extra["updates"])

    @property
    def milliseconds(self) -> float:
        """The time of an update."""
        return 1e3 * self.clock[-1] / float(self.measurement.extra["updates"][-1])

    @property
    def staleness_mean(self) -> float:
        """Of the gradients that were applied; NaN where it is not counted."""
        counts = self._histogram
        total = sum(counts)
        return sum(tau * n for tau, n in enumerate(counts)) / total if total else math.nan

    @property
    def staleness_max(self) -> float:
        """Likewise."""
        return max((tau for tau, n in enumerate(self._histogram) if n), default=math.nan)

    @property
    def dropped(self) -> float:
        """Gradients that were discarded, or steps that were not begun, in the whole run."""
        return float(self.measurement.extra["dropped"])

    @property
    def steps(self) -> list[int]:
        """Steps of each worker in the whole run; empty where they are not counted."""
        return list(self.measurement.extra["steps_by_worker"])

    @property
    def load(self) -> float:
        """The machine's load average of the last minute, when the run ended."""
        return float(self.measurement.extra.get("load", math.nan))

    def cores(self, slowed: bool) -> float:
        """How much of a core the slowed worker had, or one of the others on average."""
        shares = [
            seconds / self.measurement.seconds
            for task, seconds in self.measurement.cpu.items()
            if task.startswith("worker") and (task == SLOWED) == slowed
        ]
        return statistics.mean(shares)

    @property
    def _histogram(self) -> list[int]:
        return list(self.measurement.extra["staleness"])

    def _reached(self, values: list[float]) -> float:
        """The value where the loss crosses the target, on a line through the logarithms."""
        target, losses = self.measurement.job.target, self.losses
        for i in range(1, len(losses)):
            if losses[i] <= target:
                above, below = math.log(losses[i - 1] / target), math.log(losses[i] / target)
                part = above / (above - below)
                return values[i - 1] + part * (values[i] - values[i - 1])
        return math.nan


def load(path: Path) -> list[Run]:
    """The runs that were written to a file of raw figures."""
    names = {json.dumps(rule.options, sort_keys=True): name for name, rule in RULES.items()}
    runs = []
    for fields in read_lines(path):
        measurement = Measurement(**{**fields, "job": Job(**fields["job"])})
        runs.append(Run(names[json.dumps(measurement.job.options, sort_keys=True)], measurement))
    return runs


def runs_of(runs: Iterable[Run], rule: str) -> list[Run]:
    """The runs of a rule."""
    return [run for run in runs if run.rule == rule]


def median_of(runs: Iterable[Run], value: Callable[[Run], float]) -> float:
    """The median of what can be said of some runs; NaN where nothing can."""
    known = [value(run) for run in runs if not math.isnan(value(run))]
    return statistics.median(known) if known else math.nan
