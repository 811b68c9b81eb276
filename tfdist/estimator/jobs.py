"""`train_and_evaluate`: the same program, alone or as any task of a cluster."""

from __future__ import annotations

from typing import Any

from tfdist.errors import ConfigError
from tfdist.estimator import alone, tasks
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.job_specs import EvalSpec, TrainSpec

__all__ = ["train_and_evaluate"]


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> Any:
    """Trains and evaluates; in a cluster, this task's part of it.

    Without a cluster the process trains, evaluates after checkpoints and at the end, and exports.
    In a cluster the chief and the workers train, parameter servers hold the weights until the job
    is over, and a task of type evaluator evaluates and exports; a chief of TensorFlow 1's type,
    master, does that itself. If there are neither servers nor an evaluator, the chief evaluates
    and exports after the training.

    Args:
        estimator: the Estimator.
        train_spec: what to train on.
        eval_spec: what to evaluate on, and what to export.

    Returns:
        The last metrics and the exporters' results, if this process has evaluated after its
        training; else None.

    Raises:
        ConfigError: if the arguments are of other kinds.
        SystemExit: on a parameter server, when the job is over.
        StartError: if other tasks do not come in time.
    """
    for what, value, kind in (
        ("estimator", estimator, Estimator),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    ):
        if not isinstance(value, kind):
            raise ConfigError(f"{what}={value!r} is no tfdist.estimator.{kind.__name__}.")
    config = estimator.config
    if config.task_type == "evaluator":
        return tasks.evaluate_checkpoints(estimator, train_spec, eval_spec)
    if config.task_type == "ps":
        return tasks.serve(estimator)
    if config.num_ps_replicas or config.has_evaluator:
        evaluates = config.task_type == "master"
        return tasks.train(estimator, train_spec, eval_spec if evaluates else None)
    if config.cluster_spec.jobs:
        return tasks.train_then_evaluate(estimator, train_spec, eval_spec)
    return alone.run(estimator, train_spec, eval_spec)
