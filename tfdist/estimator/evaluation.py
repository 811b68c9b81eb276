"""Evaluation: the metrics of a checkpoint on some input, written to event files and read again."""

from __future__ import annotations

import collections
import glob
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator import distribution, modeling, sessions
from tfdist.estimator.spec import EstimatorSpec, ModeKeys

__all__ = ["eval_metrics", "evaluate"]

tf1 = tf.compat.v1


def evaluate(
    model: modeling.Model,
    input_fn: Callable[..., Any],
    steps: int | None,
    hooks: Sequence[Any],
    checkpoint: str | None,
    directory: str,
) -> dict[str, Any]:
    """Evaluates a checkpoint and writes event files to a directory; see `Estimator.evaluate`."""
    config = model.config
    replicas = distribution.for_evaluation(config)
    with modeling.graph_for(config, replicas) as step:
        spec = model.on_input(input_fn, ModeKeys.EVAL, replicas)
        values, update = _metrics(spec)
        last = tf1.train.FinalOpsHook({**values, "global_step": step})
        every = [*hooks, *spec.evaluation_hooks, last]
        with sessions.of_checkpoint(spec.scaffold, checkpoint, config, every) as session:
            done = 0
            while not session.should_stop() and (steps is None or done < steps):
                session.run(update)
                done += 1
    results = dict(sorted(last.final_ops_values.items()))
    if config.is_chief or config.task_type == "evaluator":
        _write(directory, results, checkpoint)
    shown = ", ".join(f"{name} = {value}" for name, value in results.items())
    tf1.logging.info("Saving dict for global step %s: %s", results["global_step"], shown)
    return results


def eval_metrics(directory: str, pattern: str = "*.tfevents.*") -> dict[int, dict[str, float]]:
    """The metrics in the event files of a directory, by global step, in the order of the steps."""
    result: dict[int, dict[str, float]] = collections.defaultdict(dict)
    for path in sorted(glob.glob(str(Path(glob.escape(directory)) / pattern))):
        for event in _events(path):
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    result[event.step][value.tag] = value.simple_value
    return dict(sorted(result.items()))


def _events(path: str) -> Iterator[Any]:
    """The events of a file, as far as it has been written.

    A record is its length, a checksum of that, the data and a checksum of those.
    """
    with open(path, "rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            data = file.read(length + 4)
            if len(data) < length + 4:  # It is being written.
                return
            yield tf1.Event.FromString(data[:length])


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


def _write(directory: str, results: Mapping[str, Any], checkpoint: str | None) -> None:
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
        writer = tf1.summary.FileWriterCache.get(directory)
    writer.add_summary(summary, step)
    writer.flush()
