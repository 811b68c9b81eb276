"""Metrics of canned estimators, as pairs of a value and an update op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.types import Tensor
from tfdist.utils.validation import check_range

__all__ = ["areas", "at_thresholds", "check_thresholds", "mean", "named"]

tf1 = tf.compat.v1
Metric = tuple[Any, Any]


def mean(values: Tensor, weights: Tensor | float = 1.0) -> Metric:
    """The mean of values over all examples, weighted."""
    metric: Metric = tf1.metrics.mean(values, weights=_broadcast(weights, values))
    return metric


def areas(
    labels: Tensor, probabilities: Tensor, weights: Tensor | float, suffix: str = ""
) -> dict[str, Metric]:
    """The areas under the ROC curve and the precision-recall curve, by 200 thresholds.

    Args:
        labels: 0 or 1, of the shape of `probabilities`.
        probabilities: of 1.
        weights: of the examples.
        suffix: appended to the metrics' names.
    """
    weights = _broadcast(weights, probabilities)
    curves = {
        "auc": {"curve": "ROC", "summation_method": "trapezoidal"},
        "auc_precision_recall": {"curve": "PR", "summation_method": "careful_interpolation"},
    }
    return {
        name + suffix: tf1.metrics.auc(labels, probabilities, weights, name=name, **options)
        for name, options in curves.items()
    }


def check_thresholds(thresholds: Sequence[float] | None) -> tuple[float, ...]:
    """Thresholds of probabilities as a tuple.

    Raises:
        ConfigError: for one that is not between 0 and 1.
    """
    for threshold in thresholds or ():
        check_range("thresholds", threshold, above=0, below=1)
    return tuple(thresholds or ())


def at_thresholds(
    labels: Tensor, probabilities: Tensor, weights: Tensor | float, thresholds: Sequence[float]
) -> dict[str, Metric]:
    """Accuracy, precision and recall of predicting 1 from each threshold on."""
    made: dict[str, Metric] = {}
    weights = _broadcast(weights, probabilities)
    for threshold in thresholds:
        predicted = tf.cast(probabilities > threshold, tf.float32)
        which = f"positive_threshold_{threshold:g}"
        made |= {
            f"accuracy/{which}": tf1.metrics.accuracy(labels, predicted, weights),
            f"precision/{which}": tf1.metrics.precision(labels, predicted, weights),
            f"recall/{which}": tf1.metrics.recall(labels, predicted, weights),
        }
    return made


def named(metrics: dict[str, Metric], head: str | None) -> dict[str, Metric]:
    """Metrics under the names that they have for a head with a name: `accuracy/HEAD`."""
    if any(key in metrics for key in ("loss", "global_step")):
        raise ConfigError("A head's metric must not be named 'loss' or 'global_step'.")
    return {f"{key}/{head}" if head else key: value for key, value in metrics.items()}


def _broadcast(weights: Tensor | float, values: Tensor) -> Tensor:
    """Weights `(batch, 1)` in the shape of values, since some metrics do not broadcast."""
    values = tf.convert_to_tensor(values)
    return tf.ones_like(values, dtype=tf.float32) * weights
