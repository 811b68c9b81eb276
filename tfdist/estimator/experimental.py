"""`tfdist.estimator.experimental`: hooks that stop a training early.

The chief decides, and informs the other workers by a variable that they share. It is not
saved: a training that goes on from a checkpoint decides anew.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.evaluation import eval_metrics
from tfdist.types import (
    RunArgs,
    RunContext,
    RunValues,
    Session,
    SessionHook,
    SessionTimer,
    Variable,
)
from tfdist.utils import validation

__all__ = [
    "make_early_stopping_hook",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]

tf1 = tf.compat.v1

#: The shared variable that the chief sets to stop the workers.
_VARIABLE = "tfdist_early_stopping/stop"


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionHook:
    """A hook that stops the training of all workers when a function returns true.

    Args:
        estimator: the Estimator, whose hook this is: give it to every worker.
        should_stop_fn: is asked on the chief.
        run_every_secs: seconds between two questions.
        run_every_steps: steps between two questions, instead of seconds.

    Raises:
        ConfigError: if both intervals are given, or none.
    """
    if not isinstance(estimator, Estimator):
        raise ConfigError(f"estimator={estimator!r} is no tfdist.estimator.Estimator.")
    if run_every_steps is not None and run_every_secs == 60:
        run_every_secs = None
    if (run_every_secs is None) == (run_every_steps is None):
        raise ConfigError(
            f"run_every_secs={run_every_secs!r} and run_every_steps={run_every_steps!r}: set one."
        )
    if not estimator.config.is_chief:
        return _FollowingHook()
    timer = tf1.train.SecondOrStepTimer(every_secs=run_every_secs, every_steps=run_every_steps)
    return _DecidingHook(should_stop_fn, timer)


def _stop_variable() -> Variable:
    with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
        return tf1.get_variable(
            _VARIABLE,
            shape=[],
            dtype=tf.bool,
            initializer=tf1.zeros_initializer(),
            collections=["tfdist_early_stopping"],
            trainable=False,
        )


class _DecidingHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Calls the function, and passes its decision on to the workers."""

    def __init__(self, should_stop: Callable[[], bool], timer: SessionTimer) -> None:
        self._should_stop = should_stop
        self._timer = timer

    def begin(self) -> None:
        self._step = tf1.train.get_global_step()
        variable = _stop_variable()
        self._reset = variable.initializer
        self._stop = tf1.assign(variable, True)

    def after_create_session(self, session: Session, coord: object) -> None:
        session.run(self._reset)

    def before_run(self, run_context: RunContext) -> RunArgs:
        return tf1.train.SessionRunArgs(self._step)

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        step = run_values.results
        if self._timer.should_trigger_for_step(step):
            self._timer.update_last_triggered_step(step)
            if self._should_stop():
                tf1.logging.info("Requesting early stopping at global step %d", step)
                run_context.session.run(self._stop)
                run_context.request_stop()


class _FollowingHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Stops when the chief has decided so."""

    def begin(self) -> None:
        # The chief may not have made the variable yet.
        variable = _stop_variable()
        self._asked = tf.cond(
            tf1.is_variable_initialized(variable), variable.read_value, lambda: False
        )

    def before_run(self, run_context: RunContext) -> RunArgs:
        return tf1.train.SessionRunArgs(self._asked)

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        if run_values.results:
            tf1.logging.info("Early stopping requested by the chief.")
            run_context.request_stop()


def _metric_hook(
    estimator: Estimator,
    metric_name: str,
    decide: Callable[[Mapping[int, float]], bool],
    eval_dir: str | None,
    min_steps: int,
    run_every_secs: float | None,
    run_every_steps: int | None,
) -> SessionHook:
    """A hook that stops when the values of a metric by step, in their order, ask for it."""
    directory = eval_dir or estimator.eval_dir()

    def should_stop() -> bool:
        values = {
            step: metrics[metric_name]
            for step, metrics in eval_metrics(directory).items()
            if step >= min_steps and metric_name in metrics
        }
        stops = decide(values)
        if stops:
            tf1.logging.info("%s has been %s: stopping", metric_name, values)
        return stops

    return make_early_stopping_hook(estimator, should_stop, run_every_secs, run_every_steps)


def _stagnates(
    better: Callable[[float, float], bool], name: str, most: int
) -> Callable[[Mapping[int, float]], bool]:
    validation.check_number(name, most, 0)

    def decide(values: Mapping[int, float]) -> bool:
        best, best_step = None, 0
        for step, value in values.items():
            if best is None or better(value, best):
                best, best_step = value, step
            if step - best_step >= most > 0:
                return True
        return False

    return decide


def stop_if_higher_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionHook:
    """Stops when a metric of an evaluation is higher than a threshold.

    Args:
        estimator: the Estimator.
        metric_name: the metric.
        threshold: its threshold.
        eval_dir: where the evaluations' event files are; by default the Estimator's.
        min_steps: evaluations of fewer global steps do not count.
        run_every_secs: seconds between two looks at the evaluations.
        run_every_steps: steps between two looks, instead of seconds.
    """
    more = (eval_dir, min_steps, run_every_secs, run_every_steps)
    return _metric_hook(
        estimator, metric_name, lambda values: any(v > threshold for v in values.values()), *more
    )


def stop_if_lower_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionHook:
    """Stops when a metric is lower than a threshold; see `stop_if_higher_hook`."""
    more = (eval_dir, min_steps, run_every_secs, run_every_steps)
    return _metric_hook(
        estimator, metric_name, lambda values: any(v < threshold for v in values.values()), *more
    )


def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionHook:
    """Stops when a metric has not increased for some steps; see `stop_if_higher_hook`."""
    decide = _stagnates(operator.gt, "max_steps_without_increase", max_steps_without_increase)
    more = (eval_dir, min_steps, run_every_secs, run_every_steps)
    return _metric_hook(estimator, metric_name, decide, *more)


def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionHook:
    """Stops when a metric has not decreased for some steps; see `stop_if_higher_hook`."""
    decide = _stagnates(operator.lt, "max_steps_without_decrease", max_steps_without_decrease)
    more = (eval_dir, min_steps, run_every_secs, run_every_steps)
    return _metric_hook(estimator, metric_name, decide, *more)
