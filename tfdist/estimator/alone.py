"""`train_and_evaluate` in one process: training stops while a checkpoint is evaluated."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from tfdist.estimator.job_specs import EvalSpec, TrainSpec
from tfdist.estimator.rounds import Rounds
from tfdist.estimator.types import Estimator
from tfdist.types import Session

__all__ = ["run"]

tf1 = tf.compat.v1


def run(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> tuple[Any, list[Any]]:
    """Trains, evaluates after checkpoints, and at the end.

    Returns:
        The last metrics, and the exporters' results after them.
    """
    rounds = Rounds(estimator, eval_spec, train_spec.max_steps)
    listener = _EvaluatingListener(estimator, rounds, eval_spec.throttle_secs)
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=[*train_spec.saving_listeners, listener],
    )
    return rounds.last.metrics, rounds.last.exports


class _EvaluatingListener(tf.compat.v1.train.CheckpointSaverListener):  # type: ignore[misc]
    """Evaluates saved checkpoints, not more often than is asked for."""

    def __init__(self, estimator: Estimator, rounds: Rounds, throttle: float) -> None:
        self._estimator = estimator
        self._rounds = rounds
        self._throttle = throttle
        self._saved_before = False
        self._begun: float | None = None

    def after_save(self, session: Session, global_step_value: int) -> bool | None:
        """Evaluates, but for the checkpoint that is saved before training."""
        first, self._saved_before = not self._saved_before, True
        now = time.monotonic()
        if not first and (self._begun is None or now - self._begun >= self._throttle):
            self._begun = now
            self._run(ended=False)
        return None

    def end(self, session: Session, global_step_value: int) -> None:
        """Evaluates the last checkpoint."""
        self._run(ended=True)

    def _run(self, *, ended: bool) -> None:
        latest = self._estimator.latest_checkpoint()
        if latest is not None:
            self._rounds.run(latest, ended=ended)
