"""One evaluation of a training, and the exports that follow it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tfdist.estimator.job_specs import EvalSpec
from tfdist.estimator.types import Estimator

__all__ = ["Round", "Rounds"]


@dataclasses.dataclass(frozen=True)
class Round:
    """The results of one evaluation.

    Attributes:
        metrics: its metrics; None if there was none.
        exports: the result of each exporter.
    """

    metrics: dict[str, Any] | None = None
    exports: list[Any] = dataclasses.field(default_factory=list)


class Rounds:
    """Evaluates checkpoints, each once, and asks the exporters.

    Args:
        estimator: the Estimator.
        spec: what to evaluate.
        max_steps: the global step at which the training ends; None if it is not known.
    """

    def __init__(self, estimator: Estimator, spec: EvalSpec, max_steps: int | None) -> None:
        self._estimator = estimator
        self._spec = spec
        self._max_steps = max_steps
        self._checkpoint: str | None = None
        self._was_final = False
        self.last = Round()

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint that was evaluated last."""
        return self._checkpoint

    @property
    def complete(self) -> bool:
        """Whether the round of the training's end is done."""
        return self._was_final

    def run(self, checkpoint: str, *, ended: bool = False) -> None:
        """Evaluates a checkpoint and asks the exporters.

        Args:
            checkpoint: its prefix. One that has been evaluated is not evaluated again.
            ended: whether the training has ended; it has, too, at `max_steps`.
        """
        if checkpoint == self._checkpoint and (self._was_final or not ended):
            return
        metrics = self.last.metrics if checkpoint == self._checkpoint else None
        if metrics is None:
            spec = self._spec
            metrics = self._estimator.evaluate(
                spec.input_fn, spec.steps, spec.hooks, checkpoint, spec.name
            )
        step = int(metrics["global_step"])
        final = ended or (self._max_steps is not None and step >= self._max_steps)
        self.last = Round(metrics, self._export(checkpoint, metrics, final))
        self._checkpoint, self._was_final = checkpoint, final

    def _export(self, checkpoint: str, metrics: dict[str, Any], final: bool) -> list[Any]:
        base = Path(self._estimator.model_dir) / "export"
        return [
            each.export(self._estimator, str(base / each.name), checkpoint, metrics, final)
            for each in self._spec.exporters
        ]
