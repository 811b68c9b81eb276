"""The head of regressors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.canned import metrics
from tfdist.estimator.canned.head import SUM_OVER_BATCH_SIZE, Head
from tfdist.estimator.canned.labels import as_columns
from tfdist.estimator.outputs import RegressionOutput
from tfdist.types import FeatureColumn, Tensor
from tfdist.utils.validation import check_choice, check_number

__all__ = ["RegressionHead"]


class RegressionHead(Head):
    """Numbers, by the squared error. Labels have the shape `(batch, label_dimension)`.

    Args:
        label_dimension: how many numbers are predicted for an example.
        weight_column: see `Head`.
        loss_reduction: see `Head`.
        loss_fn: see `Head`.
        inverse_link_fn: makes predictions of logits; by default they are the logits.
        name: see `Head`.
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: str | FeatureColumn | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        inverse_link_fn: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        check_number("label_dimension", label_dimension, 1)
        if inverse_link_fn is not None and not callable(inverse_link_fn):
            raise ConfigError(f"inverse_link_fn={inverse_link_fn!r} is no function.")
        super().__init__(label_dimension, weight_column, loss_reduction, loss_fn, name)
        self._inverse_link_fn = inverse_link_fn

    def predictions(self, logits: Tensor, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """See `Head.predictions`: `predictions`, and `logits` if they differ.

        Raises:
            ConfigError: for an unknown key.
        """
        logits = as_columns("logits", logits, self._logits_dimension)
        made = {"predictions": logits}
        if self._inverse_link_fn is not None:
            made = {"predictions": self._inverse_link_fn(logits), "logits": logits}
        for key in keys or ():
            check_choice("prediction", key, made)
        return {key: made[key] for key in keys} if keys else made

    def _outputs(self, predictions: dict[str, Any]) -> dict[str, Any]:
        output = RegressionOutput(predictions["predictions"])
        return {"serving_default": output, "regression": output}

    def _processed(self, labels: Tensor) -> Tensor:
        return tf.cast(as_columns("labels", labels, self._logits_dimension), tf.float32)

    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        return tf.math.squared_difference(labels, logits)

    def _metrics(self, labels: Tensor, logits: Tensor, weights: Tensor | float) -> dict[str, Any]:
        predicted = self.predictions(logits)["predictions"]
        return {
            "prediction/mean": metrics.mean(predicted, weights),
            "label/mean": metrics.mean(labels, weights),
        }
