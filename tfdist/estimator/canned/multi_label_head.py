"""The head of classifiers whose examples have any number of the classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.canned import metrics
from tfdist.estimator.canned.class_heads import ClassHead
from tfdist.estimator.canned.head import SUM_OVER_BATCH_SIZE
from tfdist.estimator.canned.labels import as_columns, ids_of, within
from tfdist.types import FeatureColumn, SparseTensor, Tensor
from tfdist.utils.validation import check_number

__all__ = ["MultiLabelHead"]

tf1 = tf.compat.v1


class MultiLabelHead(ClassHead):
    """Any of several classes, each by its own logit.

    Labels are 0 or 1 for each class, of shape `(batch, n_classes)`, or a `SparseTensor` of numbers
    or names of classes. An example's loss is the mean over its classes.

    Args:
        n_classes: the number of classes, 2 or more.
        weight_column: see `Head`.
        thresholds: probabilities from which on a class is predicted, for further metrics.
        label_vocabulary: the names of the classes in order.
        loss_reduction: see `Head`.
        loss_fn: see `Head`.
        classes_for_class_based_metrics: classes, by number or name, that get metrics of their own.
        name: see `Head`.
    """

    def __init__(
        self,
        n_classes: int,
        weight_column: str | FeatureColumn | None = None,
        thresholds: Sequence[float] | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        classes_for_class_based_metrics: Sequence[int | str] | None = None,
        name: str | None = None,
    ) -> None:
        check_number("n_classes", n_classes, 2)
        super().__init__(
            n_classes,
            label_vocabulary,
            logits_dimension=n_classes,
            weight_column=weight_column,
            loss_reduction=loss_reduction,
            loss_fn=loss_fn,
            name=name,
        )
        self._thresholds = metrics.check_thresholds(thresholds)
        self._own_metrics = [
            self._known_class(each) for each in classes_for_class_based_metrics or ()
        ]

    def _known_class(self, given: int | str) -> int:
        if isinstance(given, str) and given in (self._vocabulary or ()):
            return (self._vocabulary or ()).index(given)
        if isinstance(given, int) and 0 <= given < self._n_classes:
            return given
        raise ConfigError(
            f"classes_for_class_based_metrics has {given!r}, which is no class. Give numbers from "
            f"0 to {self._n_classes - 1}, or names of label_vocabulary."
        )

    def _all_predictions(self, logits: Tensor) -> dict[str, Any]:
        return {
            "logits": logits,
            "probabilities": tf.sigmoid(logits, name="probabilities"),
            "classes": self._every_class(logits)["all_classes"],
            **self._every_class(logits),
        }

    def _outputs(self, predictions: dict[str, Any]) -> dict[str, Any]:
        return self._classification(predictions)

    def _processed(self, labels: Tensor | SparseTensor) -> Tensor:
        if not isinstance(labels, tf.SparseTensor):
            labels = as_columns("labels", labels, self._n_classes)
            return within(tf.cast(labels, tf.float32), 2)
        ids = labels.values
        if self._vocabulary is not None:
            ids = ids_of(ids, self._vocabulary)
        ids = within(tf.cast(ids, tf.int64), self._n_classes)
        rows = tf.stack([labels.indices[:, 0], ids], axis=1)
        shape = tf.stack([labels.dense_shape[0], self._n_classes])
        ones = tf.ones_like(ids, dtype=tf.float32)
        dense = tf.minimum(tf.scatter_nd(rows, ones, shape), 1.0)
        return tf.ensure_shape(dense, [None, self._n_classes])

    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
        return tf.reduce_mean(losses, axis=-1, keepdims=True)

    def _metrics(self, labels: Tensor, logits: Tensor, weights: Tensor | float) -> dict[str, Any]:
        probabilities = tf.sigmoid(logits)
        made = {
            **metrics.areas(labels, probabilities, weights),
            **metrics.at_thresholds(labels, probabilities, weights, self._thresholds),
        }
        for i in self._own_metrics:
            suffix = f"/{self._vocabulary[i]}" if self._vocabulary else f"/class{i}"
            one, probability = labels[:, i : i + 1], probabilities[:, i : i + 1]
            made[f"probability_mean{suffix}"] = metrics.mean(probability, weights)
            made |= metrics.areas(one, probability, weights, suffix)
        return made
