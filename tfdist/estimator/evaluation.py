"""Evaluation: the metrics of a checkpoint on some input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator import distribution, modeling, sessions
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.estimator.types import Estimator
from tfdist.types import Session

__all__ = ["evaluate"]

tf1 = tf.compat.v1


class _LastValues(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Reads the metrics when the evaluation has ended."""

    def __init__(self, fetches: Mapping[str, Any]) -> None:
        self._fetches = dict(fetches)
        self.values: dict[str, Any] = {}

    def end(self, session: Session) -> None:
        """Reads them; a hook of `MonitoredSession`."""
        self.values = session.run(self._fetches)


def evaluate(
    estimator: Estimator,
    input_fn: Callable[..., Any],
    *,
    steps: int | None,
    hooks: Sequence[Any],
    checkpoint: str | None,
    place: str,
) -> dict[str, Any]:
    """Evaluates a checkpoint and writes the metrics to event files.

    Args:
        estimator: the Estimator.
        input_fn: the input.
        steps: how many batches; None means until the input ends.
        hooks: the caller's hooks.
        checkpoint: the checkpoint's prefix; None evaluates initial values.
        place: the directory of the event files.

    Returns:
        The metrics, with `loss`, the mean of the batches', and `global_step`.
    """
    config = estimator.config
    replicas = distribution.for_evaluation(config)
    with modeling.graph_for(config, replicas):
        step = modeling.make_step(replicas)
        spec = modeling.spec_on_input(estimator, input_fn, ModeKeys.EVAL, distribution=replicas)
        values, update = _metrics(spec)
        last = _LastValues({**values, "global_step": step})
        every = [*hooks, *spec.evaluation_hooks, last]
        with sessions.of_checkpoint(spec.scaffold, checkpoint, config, every) as session:
            done = 0
            while not session.should_stop() and (steps is None or done < steps):
                session.run(update)
                done += 1
    results = dict(sorted(last.values.items()))
    if config.is_chief or config.task_type == "evaluator":
        _write(place, results, checkpoint)
    shown = ", ".join(f"{name} = {value}" for name, value in results.items())
    tf1.logging.info("Saving dict for global step %s: %s", results["global_step"], shown)
    return results


def _metrics(spec: EstimatorSpec) -> tuple[dict[str, Any], Any]:
    """The metrics' values by name, and the op that updates all."""
    metrics = {"loss": None, **spec.eval_metric_ops}
    metrics["loss"] = metrics["loss"] or tf1.metrics.mean(spec.loss)
    if "global_step" in metrics:
        raise ConfigError(
            "eval_metric_ops has a metric 'global_step', which evaluation adds itself. Give it "
            "another name."
        )
    update = tf.group(
        *[each for _, updates in metrics.values() for each in tf.nest.flatten(updates)]
    )
    return {name: value for name, (value, _) in metrics.items()}, update


def _write(place: str, results: Mapping[str, Any], checkpoint: str | None) -> None:
    """Writes the metrics of a step as summaries, for TensorBoard."""
    summary = tf1.Summary()
    for name, value in results.items():
        if name == "global_step":
            continue
        if isinstance(value, bytes):  # A summary of the model's own.
            for each in tf1.Summary.FromString(value).value:
                each.tag = f"{name}/{each.tag}" if each.tag else name
                summary.value.add().CopyFrom(each)
        elif np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number):
            summary.value.add(tag=name, simple_value=float(value))
        else:
            tensor = tf.make_tensor_proto(value)
            summary.value.add(tag=name, tensor=tensor)
    step = int(results["global_step"])
    if checkpoint is not None:
        path = tf.make_tensor_proto(checkpoint, dtype=tf.string)
        summary.value.add(tag=f"checkpoint_path/{step}", tensor=path)
    with tf.Graph().as_default():  # The writer refuses to be made eagerly.
        writer = tf1.summary.FileWriterCache.get(place)
    writer.add_summary(summary, step)
    writer.flush()
