"""Heads make predictions, a loss, metrics and a training step out of logits."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.canned import losses, metrics
from tfdist.estimator.canned.labels import as_columns
from tfdist.estimator.canned.optimizers import minimize
from tfdist.estimator.outputs import PredictOutput
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.types import FeatureColumn, Features, Optimizer1, Tensor

__all__ = ["SUM_OVER_BATCH_SIZE", "Head"]

tf1 = tf.compat.v1

#: The default of `loss_reduction`: the sum of weighted losses over their number.
SUM_OVER_BATCH_SIZE = "sum_over_batch_size"


class Head(abc.ABC):
    """The last part of a model: what comes after its logits.

    Args:
        logits_dimension: the width of the logits.
        weight_column: a feature with the weights of examples; its name or a numeric column.
        loss_reduction: how losses of examples become one, `"sum_over_batch_size"` or `"sum"`.
        loss_fn: takes labels and logits, and perhaps features and loss_reduction; returns one loss
            for each example, `(batch, 1)`.
        name: is appended to the names of metrics.

    Raises:
        ConfigError: for an unknown reduction or a wrong loss function.
    """

    def __init__(
        self,
        logits_dimension: int,
        weight_column: str | FeatureColumn | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        losses.check_loss_fn(loss_fn)
        self._logits_dimension, self._name = logits_dimension, name
        self._weight_column, self._loss_fn = weight_column, loss_fn
        self._given_reduction = loss_reduction
        self._reduction = losses.reduction_of(loss_reduction)

    @property
    def name(self) -> str | None:
        """The suffix of the names of metrics."""
        return self._name

    @property
    def logits_dimension(self) -> int:
        """The width of the logits."""
        return self._logits_dimension

    @property
    def loss_reduction(self) -> str:
        """The reduction of the losses of examples to one."""
        return self._given_reduction

    @abc.abstractmethod
    def predictions(self, logits: Tensor, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Predictions by name.

        Args:
            logits: `(batch, logits_dimension)`.
            keys: which predictions; by default all that this head makes.
        """

    @abc.abstractmethod
    def _processed(self, labels: Tensor) -> Tensor:
        """Labels as the losses need them, checked."""

    @abc.abstractmethod
    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        """The losses of examples, of processed labels."""

    @abc.abstractmethod
    def _metrics(self, labels: Tensor, logits: Tensor, weights: Tensor | float) -> dict[str, Any]:
        """Metrics besides the mean loss, of processed labels."""

    @abc.abstractmethod
    def _outputs(self, predictions: dict[str, Any]) -> dict[str, Any]:
        """Export outputs by the names of signatures, besides `predict`."""

    def loss(
        self,
        labels: Tensor | None,
        logits: Tensor,
        features: Features | None = None,
        mode: str | None = None,
        regularization_losses: Sequence[Any] | None = None,
    ) -> Tensor:
        """The loss that is trained on, a scalar.

        Args:
            labels: as described in the head's class.
            logits: `(batch, logits_dimension)`.
            features: tensors by name, for weights.
            mode: has no effect.
            regularization_losses: scalars to add.

        Raises:
            ConfigError: if labels or logits are missing or of a wrong shape.
        """
        del mode
        logits = as_columns("logits", logits, self._logits_dimension)
        each = self._unreduced(self._checked_labels(labels), logits, features)
        weights = losses.example_weights(features, self._weight_column)
        loss = losses.reduced(each, weights, self._reduction)
        return tf.add_n([loss, *regularization_losses]) if regularization_losses else loss

    def eval_metric_ops(
        self,
        features: Features,
        logits: Tensor,
        labels: Tensor | None,
        regularization_losses: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Metrics by name, each a value and an update op; arguments as for `loss`."""
        logits = as_columns("logits", logits, self._logits_dimension)
        labels = self._checked_labels(labels)
        weights = losses.example_weights(features, self._weight_column)
        with tf1.name_scope("metrics"):
            made = {
                "average_loss": metrics.mean(self._unreduced(labels, logits, features), weights),
                **self._metrics(labels, logits, weights),
            }
            if regularization_losses:
                made["regularization_loss"] = metrics.mean(tf.add_n(list(regularization_losses)))
        return metrics.named(made, self._name)

    def create_estimator_spec(
        self,
        features: Features,
        mode: str,
        logits: Tensor,
        labels: Tensor | None = None,
        optimizer: Optimizer1 | None = None,
        trainable_variables: Sequence[Any] | None = None,
        train_op_fn: Callable[[Any], Any] | None = None,
        update_ops: Sequence[Any] | None = None,
        regularization_losses: Sequence[Any] | None = None,
    ) -> EstimatorSpec:
        """Builds the value that a `model_fn` returns.

        Args:
            features: tensors by name.
            mode: one of `ModeKeys`.
            logits: `(batch, logits_dimension)`.
            labels: as described in the head's class.
            optimizer: of `tf.compat.v1.train` or of Keras.
            trainable_variables: the variables to train; by default all trainable variables.
            train_op_fn: makes the training op of the loss, instead of `optimizer`.
            update_ops: run before each step; by default those of `GraphKeys.UPDATE_OPS`.
            regularization_losses: scalars added to the loss.

        Raises:
            ConfigError: to train with neither or both of `optimizer` and `train_op_fn`.
        """
        logits = as_columns("logits", logits, self._logits_dimension)
        with tf1.name_scope(f"head/{self._name}" if self._name else "head"):
            predictions = self.predictions(logits)
            if mode == ModeKeys.PREDICT:
                outputs = {**self._outputs(predictions), "predict": PredictOutput(predictions)}
                return EstimatorSpec(mode, predictions=predictions, export_outputs=outputs)
            loss = self.loss(labels, logits, features, mode, regularization_losses)
            if mode == ModeKeys.EVAL:
                result = self.eval_metric_ops(features, logits, labels, regularization_losses)
                return EstimatorSpec(
                    mode, predictions=predictions, loss=loss, eval_metric_ops=result
                )
        step = _step(optimizer, train_op_fn, trainable_variables)
        with tf.control_dependencies(_update_ops(update_ops)):
            return EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=step(loss))

    def _unreduced(self, labels: Tensor, logits: Tensor, features: Features | None) -> Tensor:
        if self._loss_fn is None:
            return self._losses(labels, logits)
        return losses.custom_loss(self._loss_fn, labels, logits, features, self._given_reduction)

    def _checked_labels(self, labels: Tensor | None) -> Tensor:
        if labels is None:
            raise ConfigError(
                "The head got no labels. Let input_fn return (features, labels), and model_fn "
                "pass the labels on."
            )
        return self._processed(labels)


def _step(
    optimizer: Optimizer1 | None,
    train_op_fn: Callable[[Any], Any] | None,
    variables: Sequence[Any] | None,
) -> Callable[[Any], Any]:
    """The function that makes the training op of a loss."""
    if (optimizer is None) == (train_op_fn is None):
        which = "neither" if optimizer is None else "both"
        raise ConfigError(
            f"create_estimator_spec() got {which} of optimizer and train_op_fn to train with. "
            "Give one of them."
        )
    if train_op_fn is not None:
        return train_op_fn
    assert optimizer is not None
    trained = tf1.trainable_variables() if variables is None else variables
    return lambda loss: minimize(optimizer, loss, trained, tf1.train.get_or_create_global_step())


def _update_ops(given: Sequence[Any] | None) -> list[Any]:
    return list(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS) if given is None else given)
