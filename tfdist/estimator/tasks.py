"""`train_and_evaluate` in the tasks of a cluster."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator import alone, ending, servers
from tfdist.estimator.job_specs import EvalSpec, TrainSpec
from tfdist.estimator.rounds import Rounds
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.types import Estimator

__all__ = ["evaluate_checkpoints", "serve", "train", "train_then_evaluate"]

tf1 = tf.compat.v1

#: Seconds without a task that trains after which a job counts as over.
_SILENCE = 300.0
#: Seconds between two looks for a new checkpoint.
_LOOK_EVERY = 1.0


def train(estimator: Estimator, spec: TrainSpec, evaluation: EvalSpec | None = None) -> Any:
    """Trains, on the chief and on workers. The chief decides when the training has ended.

    Args:
        estimator: the Estimator.
        spec: what to train on.
        evaluation: the evaluation by this task itself, after checkpoints and at the end.

    Returns:
        What it has evaluated last, as `train_and_evaluate` returns it; else None.
    """
    chief = estimator.config.is_chief
    if estimator.config.num_ps_replicas:
        servers.ensure(estimator.config)  # Also if there is nothing left to train: others look.
    if chief:
        ending.clear(estimator.config)
    result = None
    if evaluation is not None:
        result = alone.run(estimator, spec, evaluation)
    else:
        estimator.train(
            spec.input_fn,
            hooks=spec.hooks,
            max_steps=spec.max_steps,
            saving_listeners=spec.saving_listeners,
        )
    if chief:
        ending.write(estimator.config)
    return result


def train_then_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> Any:
    """Trains in lockstep with other workers; then the chief evaluates and exports.

    Returns:
        The last metrics and the exporters' results, on the chief; None on other workers.
    """
    train(estimator, train_spec)
    latest = estimator.latest_checkpoint()
    if not estimator.config.is_chief or latest is None:
        return None
    rounds = Rounds(estimator, eval_spec, train_spec.max_steps)
    rounds.run(latest, ended=True)
    return rounds.last.metrics, rounds.last.exports


def serve(estimator: Estimator) -> None:
    """Holds weights until the job is over; then ends the program.

    `tfdist run` stops parameter servers when the other tasks have ended. If each task was
    started by itself, a server ends when no task that trains has been there for minutes.

    Raises:
        SystemExit: when the job is over.
        StartError: if no task that trains comes in time.
    """
    config = estimator.config
    servers.ensure(config)
    first = next(kind for kind in servers.TRAINERS if kind in config.cluster_spec.jobs)
    servers.await_servers(config, (first,))
    servers.await_silence(config, _SILENCE)
    raise SystemExit(0)


def evaluate_checkpoints(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
    """Evaluates each new checkpoint until the training has ended and its last one is evaluated.

    Raises:
        ConfigError: if the training has ended without a checkpoint.
    """
    rounds = Rounds(estimator, eval_spec, train_spec.max_steps)
    watch = _Watch(estimator.config)
    not_before = time.monotonic() + eval_spec.start_delay_secs
    while not rounds.complete:
        ended = watch.ended()  # Before the look at the checkpoints, so that none is missed.
        latest = estimator.latest_checkpoint()
        if ended and latest is None:
            raise ConfigError(
                f"The training has ended, but model_dir={estimator.model_dir!r} has no checkpoint. "
                "The evaluator and the chief must share this directory."
            )
        if latest is not None and (ended or time.monotonic() >= not_before):
            begun = time.monotonic()
            if _evaluated(rounds, latest, ended):
                not_before = begun + eval_spec.throttle_secs
        if not rounds.complete:
            time.sleep(_LOOK_EVERY)


def _evaluated(rounds: Rounds, checkpoint: str, ended: bool) -> bool:
    """Evaluates a checkpoint, unless it is removed meanwhile in favour of a newer one."""
    if not ended and checkpoint == rounds.checkpoint:
        return False
    try:
        rounds.run(checkpoint, ended=ended)
    except (tf.errors.NotFoundError, ValueError):
        if tf1.train.checkpoint_exists(checkpoint):
            raise
        return False
    return True


class _Watch:
    """Whether the training has ended: the chief has noted it, or nobody trains any more."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._found = ending.note_of(config)  # Perhaps of a training before this one.
        self._heard = time.monotonic()

    def ended(self) -> bool:
        note = ending.note_of(self._config)
        if note is not None and note != self._found:
            return True
        if note is None:
            self._found = None
        if servers.any_listens(self._config.training_cluster, servers.TRAINERS):
            self._heard = time.monotonic()
        quiet = time.monotonic() - self._heard
        return quiet > (_SILENCE if note is None else _SILENCE / 5)
