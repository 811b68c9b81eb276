"""Heads make predictions, a loss, metrics and a training step out of logits."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.calling import call_with, check_parameters
from tfdist.estimator.canned.optimizers import minimize
from tfdist.estimator.export import PredictOutput
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.types import FeatureColumn, Features, Optimizer1, Scalar, SparseTensor, Tensor
from tfdist.utils.validation import check_choice

__all__ = ["SUM_OVER_BATCH_SIZE", "Head", "as_columns", "mean"]

tf1 = tf.compat.v1
_V1 = tf1.losses.Reduction

#: The default of `loss_reduction`: the sum of weighted losses over their number.
SUM_OVER_BATCH_SIZE = "sum_over_batch_size"

#: Values of `loss_reduction`: the names of TensorFlow 2, and those of TensorFlow 1. `none` is not
#: among them: a model is trained by one number.
_REDUCTIONS = {
    SUM_OVER_BATCH_SIZE: _V1.SUM_OVER_BATCH_SIZE,
    "auto": _V1.SUM_OVER_BATCH_SIZE,
    "sum": _V1.SUM,
    **{name: name for name in _V1.all() if name != _V1.NONE},
}

_LOSS_FN_TAKES = ("labels", "logits", "features", "loss_reduction")


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
        if loss_fn is not None:
            check_parameters("loss_fn", loss_fn, _LOSS_FN_TAKES, ("labels", "logits"))
        check_choice("loss_reduction", loss_reduction, _REDUCTIONS)
        self.name, self.logits_dimension = name, logits_dimension
        self.loss_reduction = loss_reduction
        self._weight_column, self._loss_fn = weight_column, loss_fn

    @abc.abstractmethod
    def _all_predictions(self, logits: Tensor) -> dict[str, Any]:
        """Predictions by name."""

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

    def predictions(self, logits: Tensor, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Predictions by name.

        Args:
            logits: `(batch, logits_dimension)`.
            keys: which predictions; by default all that this head makes.

        Raises:
            ConfigError: for an unknown key.
        """
        made = self._all_predictions(as_columns("logits", logits, self.logits_dimension))
        for key in keys or ():
            check_choice("prediction", key, made)
        return {key: made[key] for key in keys} if keys else made

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
        logits = as_columns("logits", logits, self.logits_dimension)
        # `tf.distribute` learns from the reduction whether replicas' losses are added or averaged.
        loss = tf1.losses.compute_weighted_loss(
            self._unreduced(self._checked_labels(labels), logits, features),
            self._weights(features),
            loss_collection=None,
            reduction=_REDUCTIONS[self.loss_reduction],
        )
        return tf.add_n([loss, *regularization_losses]) if regularization_losses else loss

    def eval_metric_ops(
        self,
        features: Features,
        logits: Tensor,
        labels: Tensor | None,
        regularization_losses: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Metrics by name, each a value and an update op; arguments as for `loss`."""
        logits = as_columns("logits", logits, self.logits_dimension)
        labels = self._checked_labels(labels)
        weights = self._weights(features)
        with tf1.name_scope("metrics"):
            made = {
                "average_loss": mean(self._unreduced(labels, logits, features), weights),
                **self._metrics(labels, logits, weights),
            }
            if regularization_losses:
                made["regularization_loss"] = mean(tf.add_n(list(regularization_losses)))
        return {f"{key}/{self.name}" if self.name else key: each for key, each in made.items()}

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
        with tf1.name_scope(f"head/{self.name}" if self.name else "head"):
            predictions = self.predictions(logits)
            if mode == ModeKeys.PREDICT:
                outputs = {**self._outputs(predictions), "predict": PredictOutput(predictions)}
                return EstimatorSpec(mode, predictions, export_outputs=outputs)
            loss = self.loss(labels, logits, features, mode, regularization_losses)
            if mode == ModeKeys.EVAL:
                metric_ops = self.eval_metric_ops(features, logits, labels, regularization_losses)
                return EstimatorSpec(mode, predictions, loss, eval_metric_ops=metric_ops)
        step = _step(optimizer, train_op_fn, trainable_variables)
        if update_ops is None:
            update_ops = tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)
        with tf.control_dependencies(update_ops):
            return EstimatorSpec(mode, predictions, loss, step(loss))

    def _unreduced(self, labels: Tensor, logits: Tensor, features: Features | None) -> Tensor:
        """The losses of examples, `(batch, n)`."""
        if self._loss_fn is None:
            return self._losses(labels, logits)
        values = (labels, logits, features, self.loss_reduction)
        offered = dict(zip(_LOSS_FN_TAKES, values, strict=True))
        losses = tf.convert_to_tensor(call_with(self._loss_fn, offered))
        if losses.shape.rank not in (None, 2) or losses.shape[-1:] not in ([1], [None]):
            raise ConfigError(
                f"loss_fn returned a tensor of shape {losses.shape}. It must return one loss for "
                "each example, (batch, 1), not reduced."
            )
        return losses

    def _checked_labels(self, labels: Tensor | None) -> Tensor:
        if labels is None:
            raise ConfigError(
                "The head got no labels. Let input_fn return (features, labels), and model_fn "
                "pass the labels on."
            )
        return self._processed(labels)

    def _weights(self, features: Features | None) -> Scalar:
        """The weights of examples, a float tensor `(batch, 1)`, or 1.0 without a column."""
        column = self._weight_column
        if column is None:
            return 1.0
        key = column if isinstance(column, str) else column.key
        if not isinstance(features, Mapping) or key not in features:
            raise ConfigError(
                f"weight_column={key!r} is no feature. There are "
                f"{sorted(features) if isinstance(features, Mapping) else features!r}. Let "
                "input_fn return the weights with the features."
            )
        weights = tf.convert_to_tensor(features[key])
        normalize = getattr(column, "normalizer_fn", None)
        if normalize is not None:
            weights = normalize(weights)
        return tf.reshape(tf.cast(weights, tf.float32), [-1, 1])


def as_columns(what: str, values: Tensor | SparseTensor, width: int) -> Tensor:
    """Labels or logits as a tensor `(batch, width)`, where `(batch,)` stands for width 1.

    Raises:
        ConfigError: if they are known to be of another shape.
    """
    dense: Tensor = tf.convert_to_tensor(values)
    if dense.shape.rank == 1 and width == 1:
        dense = dense[:, tf.newaxis]
    if dense.shape.rank is None:
        return tf.reshape(dense, [-1, width])
    if dense.shape.rank != 2 or dense.shape[-1] not in (None, width):
        raise ConfigError(
            f"The {what} have shape {dense.shape}, not (batch, {width}). Check input_fn, and "
            "n_classes or label_dimension of the estimator."
        )
    return tf.ensure_shape(dense, [None, width])


def mean(values: Tensor, weights: Tensor | float = 1.0) -> tuple[Any, Any]:
    """The metric of the mean of values over all examples, weighted by weights `(batch, 1)`."""
    return tf1.metrics.mean(values, tf.ones_like(values, dtype=tf.float32) * weights)


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
    trained = tf1.trainable_variables() if variables is None else variables
    return lambda loss: minimize(optimizer, loss, trained, tf1.train.get_or_create_global_step())
