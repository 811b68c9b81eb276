"""The logs of a step: the same on every replica, and equal to one process's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.comm.batch_dependence import is_symbolic
from tfdist.comm.replica_collectives import sum_over_replicas
from tfdist.keras.assignments import logged_on_whole_batch
from tfdist.keras.batch_axes import batch_axis
from tfdist.keras.replica_context import Step
from tfdist.keras.whole_statistics import average_of
from tfdist.types import Logs, Metric, Model


@dataclasses.dataclass(frozen=True)
class Result:
    """A number that a metric has given.

    Attributes:
        metric: the metric.
        key: the number's name, if the metric's result is a dictionary.
        value: the number, which keeps its `id` its own.
    """

    metric: Any
    key: str | None
    value: Any

    def now(self) -> Any:
        """The number of the metric's present state."""
        return self.of(self.metric.result())

    def of(self, result: Any) -> Any:
        """The number of the same name in another result of the metric."""
        return result if self.key is None else result[self.key]


#: Results of metrics, by the `id` of their values.
Results = dict[int, Result]


def single_metrics(model: Model) -> list[Any]:
    """The metrics of a model, those of `compile` one by one once they are built."""
    parts = (getattr(metric, "metrics", None) or [metric] for metric in model.metrics)
    return list(dict.fromkeys(itertools.chain.from_iterable(parts)))


def summed_metrics(model: Model) -> list[Any]:
    """The metrics of a model whose states add up over the replicas.

    To be asked before a step is run, so that all replicas have the same answer: the first one to
    trace the step may create more.
    """
    return [
        m
        for m in single_metrics(model)
        if "result" not in vars(m) and all(v.aggregation == "sum" for v in m.variables)
    ]


class NoticedResults:
    """Notes, on each replica, which tensors are results of metrics.

    A result is not a linear function of a metric's state, so it cannot be averaged over the
    replicas: it has to be computed from the sum of their states. Replicas may be threads that
    share the metrics, so what is noted is kept for each thread.

    Args:
        metrics: the result of `summed_metrics`.
    """

    def __init__(self, metrics: list[Any]) -> None:
        self._metrics = metrics
        self._local = threading.local()

    def __enter__(self) -> NoticedResults:
        for metric in self._metrics:
            object.__setattr__(metric, "result", self._noticing(metric))
        return self

    def __exit__(self, *error: object) -> None:
        for metric in self._metrics:
            object.__delattr__(metric, "result")

    def on_this_replica(self) -> Results:
        """The values noted on the calling replica."""
        if not hasattr(self._local, "results"):
            self._local.results = {}
        noted: Results = self._local.results
        return noted

    def _noticing(self, metric: Metric) -> Callable[[], Any]:
        original = metric.result

        @functools.wraps(original)
        def result() -> object:
            value = original()
            named = value if isinstance(value, dict) else {None: value}
            for key, each in named.items():
                self.on_this_replica()[id(each)] = Result(metric, key, each)
            return value

        return result


def average_logs(step: Step, logs: Logs | None, results: Results) -> Logs | None:
    """Logs that all replicas agree on.

    Results of metrics are computed from the states of all replicas; other numbers, and tensors that
    have no row for each example, are averaged, weighted by examples; all else stays as it is.

    Args:
        step: the step that returned the logs.
        logs: its result, a nest of tensors and numbers.
        results: the results that `NoticedResults` noted on this replica.
    """
    flat = tf.nest.flatten(logs)
    of_metrics = _results_in(flat, results)
    scalars: dict[int, Any] = {}
    for i, value in enumerate(flat):
        if i in of_metrics:
            continue
        if _is_scalar(value):
            scalars[i] = tf.convert_to_tensor(value)
        elif is_symbolic(value) and (value.dtype.is_floating or value.dtype.is_integer):
            whole = None if step.is_whole else logged_on_whole_batch(step, value)
            if whole is not None:
                flat[i] = whole
                note_agreed(whole)
            elif _has_no_rows(step, value):
                scalars[i] = value
    weighed = [step.weigh(average_of(step, tf.cast(v, tf.float32))) for v in scalars.values()]
    averages = _sum_states(flat, of_metrics, weighed)
    for (i, value), average in zip(scalars.items(), averages, strict=True):
        flat[i] = tf.cast(average, value.dtype) if value.dtype.is_floating else average
        note_agreed(flat[i])
    return tf.nest.pack_sequence_as(logs, flat)


def sum_results(logs: Logs, results: Results) -> Logs:
    """Logs with the results of metrics computed from the states of all replicas.

    Args:
        logs: a nest of tensors.
        results: the results that `NoticedResults` noted on this replica.
    """
    flat = tf.nest.flatten(logs)
    _sum_states(flat, _results_in(flat, results), [])
    return tf.nest.pack_sequence_as(logs, flat)


def _results_in(flat: list[Any], results: Results) -> dict[int, Result]:
    """The logs that are results of metrics, by place."""
    return {i: results[id(v)] for i, v in enumerate(flat) if id(v) in results}


def _sum_states(flat: list[Any], results: dict[int, Result], more: list[Any]) -> list[Any]:
    """Puts the results of metrics over all replicas in place; returns the sums of more numbers.

    All go in one exchange.
    """
    metrics = {id(result.metric): result.metric for result in results.values()}
    states = [[tf.convert_to_tensor(v.value) for v in m.variables] for m in metrics.values()]
    if not more and not states:
        return []
    together = sum_over_replicas([*tf.nest.flatten(states), *more])
    sums = tf.nest.pack_sequence_as(states, together[: len(together) - len(more)])
    whole = {
        key: metric.stateless_result(state)
        for (key, metric), state in zip(metrics.items(), sums, strict=True)
    }
    for i, result in results.items():
        flat[i] = result.of(whole[id(result.metric)])
        note_agreed(flat[i])
    return together[len(together) - len(more) :]


def note_agreed(value: Any) -> None:
    """Notes that a tensor is the same on all replicas, so that Keras need not reduce it."""
    value._tfdist_agreed = True


def is_agreed(value: object) -> bool:
    """Whether a value is known to be the same on all replicas."""
    return bool(getattr(value, "_tfdist_agreed", False))


def _has_no_rows(step: Step, value: Any) -> bool:
    """Whether a tensor of a graph, such as the norms of some weights, holds no examples."""
    return (
        value.dtype.is_floating
        and value.shape.is_fully_defined()
        and value.shape.rank != 0
        and batch_axis(value, step.depends) is None
    )


def _is_scalar(value: object) -> bool:
    if isinstance(value, (int, float)):
        return True
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return False
    kind = tf.as_dtype(value.dtype)
    return tuple(value.shape) == () and (kind.is_floating or kind.is_integer)
