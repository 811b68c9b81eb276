"""The logs of a step: the same on every replica, and equal to one process's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras.exchange import sum_over_replicas
from tfdist.keras.step import Step

#: The metric whose result a tensor is, by the tensor's `id`; with the tensor, to keep it alive.
Results = dict[int, tuple[Any, Any]]


def summed_metrics(model: Any) -> list[Any]:
    """The metrics of a model whose states add up over the replicas.

    To be asked before a step is run, so that all replicas have the same answer: the first one to
    trace the step may create more.
    """
    metrics: dict[Any, None] = {}
    for metric in model.metrics:
        for part in getattr(metric, "metrics", None) or [metric]:
            metrics[part] = None
    return [m for m in metrics if all(v.aggregation == "sum" for v in m.variables)]


@contextlib.contextmanager
def noticed_results(metrics: list[Any]) -> Iterator[Results]:
    """Notes in the block which tensors are results of metrics.

    A result is no linear function of a metric's state, so it cannot be averaged over the replicas:
    it has to be computed from the sum of their states.

    Args:
        metrics: what `summed_metrics` returned.
    """
    results: Results = {}
    for metric in metrics:
        object.__setattr__(metric, "result", _noticing(metric, results))
    try:
        yield results
    finally:
        for metric in metrics:
            object.__delattr__(metric, "result")


def _noticing(metric: Any, results: Results) -> Callable[[], Any]:
    original = metric.result

    @functools.wraps(original)
    def result() -> Any:
        value = original()
        results[id(value)] = (metric, value)
        return value

    return result


def average_logs(step: Step, logs: Any, results: Results) -> Any:
    """Logs that all replicas agree on.

    Results of metrics are computed from the states of all replicas; other scalars are averaged,
    weighted by examples; what is no scalar is left as it is.

    Args:
        step: the step that returned the logs.
        logs: what it returned, a nest of tensors and numbers.
        results: what `noticed_results` noted.
    """
    flat = tf.nest.flatten(logs)
    metrics = {i: results[id(v)][0] for i, v in enumerate(flat) if id(v) in results}
    scalars = {
        i: tf.convert_to_tensor(v) for i, v in enumerate(flat) if i not in metrics and _is_scalar(v)
    }
    states = [[tf.convert_to_tensor(v.value) for v in m.variables] for m in metrics.values()]
    weighed = [step.weigh(tf.cast(v, tf.float32)) for v in scalars.values()]
    if not weighed and not states:
        return logs
    together = sum_over_replicas([*tf.nest.flatten(states), *weighed])
    sums = tf.nest.pack_sequence_as(states, together[: len(together) - len(weighed)])
    averages = together[len(together) - len(weighed) :]
    for i, metric, state in zip(metrics, metrics.values(), sums, strict=True):
        flat[i] = metric.stateless_result(state)
    for (i, value), average in zip(scalars.items(), averages, strict=True):
        flat[i] = tf.cast(average, value.dtype) if value.dtype.is_floating else average
    return tf.nest.pack_sequence_as(logs, flat)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return True
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return False
    kind = tf.as_dtype(value.dtype)
    return tuple(value.shape) == () and (kind.is_floating or kind.is_integer)
