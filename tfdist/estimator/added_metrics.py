"""Adds metrics to an Estimator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.errors import ConfigError
from tfdist.estimator.calling import call_with, parameters_of
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.types import Features, Tensor

__all__ = ["add_metrics"]

_TAKES = ("features", "labels", "predictions", "config")


def add_metrics(estimator: Estimator, metric_fn: Callable[..., Any]) -> Estimator:
    """An Estimator that evaluates more metrics.

    Args:
        estimator: the Estimator to add to; it stays as it is.
        metric_fn: takes any of `features`, `labels`, `predictions` and `config`, and returns for
            each metric `(value, update_op)`, as `tf.compat.v1.metrics` makes them.

    Raises:
        ConfigError: if `metric_fn` takes something else.
    """
    unknown = [name for name in parameters_of(metric_fn) if name not in _TAKES]
    if unknown:
        raise ConfigError(
            f"metric_fn takes {unknown[0]!r}. It may take any of {', '.join(_TAKES)}."
        )

    def model_fn(features: Features, labels: Tensor, mode: str, config: RunConfig) -> EstimatorSpec:
        spec = estimator.call_model_fn(features, labels, mode, config)
        if mode != ModeKeys.EVAL:
            return spec
        offered = {
            "features": features,
            "labels": labels,
            "predictions": spec.predictions,
            "config": config,
        }
        more = call_with("metric_fn", metric_fn, offered) or {}
        changed: EstimatorSpec = spec._replace(eval_metric_ops={**spec.eval_metric_ops, **more})
        return changed

    return Estimator(
        model_fn,
        model_dir=estimator.model_dir,
        config=estimator.config,
        params=estimator.params,
        warm_start_from=estimator.warm_start_settings,
    )
