"""The cost of a coarser precision: the score of a model before and after, on data with labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfdist.exporting.examples import Examples
from tfdist.exporting.subject import Arrays
from tfdist.types import Array

__all__ = ["Score", "scores"]

_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Score:
    """One output's score, before and after.

    Attributes:
        output: its name.
        metric: `accuracy` (the share of examples that are right) or `mean squared error`.
        model: of the model.
        written: of the written model.
        examples: how many were scored.
    """

    output: str
    metric: str
    model: float
    written: float
    examples: int

    @property
    def loss(self) -> float:
        """The loss: of accuracy, or the squared error's growth relative to the model's."""
        if self.metric == "accuracy":
            return self.model - self.written
        return (self.written - self.model) / self.model if self.model else self.written


def scores(
    model: Callable[[Arrays], Arrays], written: Callable[[Arrays], Arrays], examples: Examples
) -> tuple[Score, ...]:
    """Scores each output that has labels.

    Args:
        model: computes the model's outputs.
        written: computes those of the written model.
        examples: with labels.
    """
    if not examples.labels:
        return ()
    before, after = _outputs(model, examples), _outputs(written, examples)
    result = []
    for name, labels in examples.labels.items():
        metric, score = _metric(labels, before[name])
        values = (score(labels, before[name]), score(labels, after[name]))
        result.append(Score(name, metric, *values, len(examples)))
    return tuple(result)


def _outputs(run: Callable[[Arrays], Arrays], examples: Examples) -> Arrays:
    parts = list(_batches(run, examples))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _batches(run: Callable[[Arrays], Arrays], examples: Examples) -> Iterator[Arrays]:
    for start in range(0, len(examples), _BATCH):
        yield run(examples.part(start, start + _BATCH).inputs)


def _metric(labels: Array, outputs: Array) -> tuple[str, Callable[[Any, Any], float]]:
    """Accuracy for classes, as numbers or one-hot, and for yes or no; else the squared error."""
    classes = outputs.shape[-1] if outputs.ndim > 1 else 1
    whole = labels.dtype.kind in "iub" or bool((labels == np.round(labels)).all())
    if classes > 1 and whole:
        if labels.shape == outputs.shape[:-1]:
            return "accuracy", lambda y, out: float((out.argmax(-1) == y).mean())
        if labels.shape == (*outputs.shape[:-1], 1):
            return "accuracy", lambda y, out: float((out.argmax(-1) == y[..., 0]).mean())
        if labels.shape == outputs.shape and (labels.sum(-1) == 1).all():
            return "accuracy", lambda y, out: float((out.argmax(-1) == y.argmax(-1)).mean())
    if classes == 1 and whole and set(np.unique(labels)) <= {0, 1}:
        threshold = 0.5 if outputs.min() >= 0 and outputs.max() <= 1 else 0.0
        return "accuracy", lambda y, out: float(((out > threshold) == _like(y > 0, out)).mean())
    return "mean squared error", lambda y, out: float(((out - _like(y, out)) ** 2).mean())


def _like(labels: Array, outputs: Array) -> Array:
    return labels.reshape(outputs.shape)
