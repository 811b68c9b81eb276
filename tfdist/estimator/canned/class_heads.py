"""The heads of classifiers: two classes, one of several, any of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.canned import metrics
from tfdist.estimator.canned.head import SUM_OVER_BATCH_SIZE, Head
from tfdist.estimator.canned.labels import as_columns, check_vocabulary, ids_of, names_of, within
from tfdist.estimator.outputs import ClassificationOutput, RegressionOutput
from tfdist.types import FeatureColumn, Tensor
from tfdist.utils.validation import check_choice, check_number

__all__ = ["BinaryClassHead", "ClassHead", "MultiClassHead", "classifier_head"]

tf1 = tf.compat.v1


class ClassHead(Head):
    """The base of heads whose examples belong to classes."""

    def __init__(
        self, n_classes: int, label_vocabulary: Sequence[str] | None, **others: Any
    ) -> None:
        self._n_classes = n_classes
        self._vocabulary = check_vocabulary(label_vocabulary, n_classes)
        super().__init__(**others)

    def predictions(self, logits: Tensor, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """See `Head.predictions`; classes are strings, class ids int64 numbers.

        Raises:
            ConfigError: for an unknown key.
        """
        logits = as_columns("logits", logits, self._logits_dimension)
        made = self._all_predictions(logits)
        for key in keys or ():
            check_choice("prediction", key, made)
        return {key: made[key] for key in keys} if keys else made

    def _all_predictions(self, logits: Tensor) -> dict[str, Any]:
        raise NotImplementedError

    def _every_class(self, logits: Tensor) -> dict[str, Any]:
        """All classes, once for each example: what Serving's Classify answers with."""
        ids = tf.tile(tf.range(self._n_classes)[tf.newaxis], [tf.shape(logits)[0], 1])
        return {"all_class_ids": ids, "all_classes": names_of(ids, self._vocabulary)}

    def _classification(self, predictions: dict[str, Any]) -> dict[str, Any]:
        classes = self._every_class(predictions["probabilities"])["all_classes"]
        output = ClassificationOutput(predictions["probabilities"], classes)
        return {"serving_default": output, "classification": output}


class BinaryClassHead(ClassHead):
    """Two classes, by one logit. Labels are 0 or 1, or two names, of shape `(batch, 1)`.

    Args:
        weight_column: see `Head`.
        thresholds: probabilities from which on class 1 is predicted, for further metrics.
        label_vocabulary: the names of the classes 0 and 1.
        loss_reduction: see `Head`.
        loss_fn: see `Head`.
        name: see `Head`.
    """

    def __init__(
        self,
        weight_column: str | FeatureColumn | None = None,
        thresholds: Sequence[float] | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        self._thresholds = metrics.check_thresholds(thresholds)
        super().__init__(
            2,
            label_vocabulary,
            logits_dimension=1,
            weight_column=weight_column,
            loss_reduction=loss_reduction,
            loss_fn=loss_fn,
            name=name,
        )

    def _all_predictions(self, logits: Tensor) -> dict[str, Any]:
        two = tf.concat([tf.zeros_like(logits), logits], axis=-1)
        ids = tf.argmax(two, axis=-1)[:, tf.newaxis]
        return {
            "logits": logits,
            "logistic": tf.sigmoid(logits, name="logistic"),
            "probabilities": tf.nn.softmax(two, name="probabilities"),
            "class_ids": ids,
            "classes": names_of(ids, self._vocabulary),
            **self._every_class(logits),
        }

    def _outputs(self, predictions: dict[str, Any]) -> dict[str, Any]:
        regression = RegressionOutput(predictions["logistic"])
        return {**self._classification(predictions), "regression": regression}

    def _processed(self, labels: Tensor) -> Tensor:
        labels = as_columns("labels", labels, 1)
        if self._vocabulary is not None:
            labels = ids_of(labels, self._vocabulary)
        return within(tf.cast(labels, tf.float32), 2)

    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        return tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)

    def _metrics(self, labels: Tensor, logits: Tensor, weights: Tensor | float) -> dict[str, Any]:
        probability = tf.sigmoid(logits)
        predicted = tf.cast(logits > 0, tf.float32)
        by_example = tf.ones_like(labels) * weights
        share, update = metrics.mean(labels, weights)
        return {
            "accuracy": tf1.metrics.accuracy(labels, predicted, by_example),
            "accuracy_baseline": (tf.maximum(share, 1 - share), update),
            "label/mean": metrics.mean(labels, weights),
            "precision": tf1.metrics.precision(labels, predicted, by_example),
            "prediction/mean": metrics.mean(probability, weights),
            "recall": tf1.metrics.recall(labels, predicted, by_example),
            **metrics.areas(labels, probability, weights),
            **metrics.at_thresholds(labels, probability, weights, self._thresholds),
        }


class MultiClassHead(ClassHead):
    """One of three or more classes. Labels are numbers or names, of shape `(batch, 1)`.

    Args:
        n_classes: the number of classes, 3 or more.
        weight_column: see `Head`.
        label_vocabulary: the names of the classes in order.
        loss_reduction: see `Head`.
        loss_fn: see `Head`.
        name: see `Head`.
    """

    def __init__(
        self,
        n_classes: int,
        weight_column: str | FeatureColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        check_number("n_classes", n_classes, 3, "For two classes there is BinaryClassHead.")
        super().__init__(
            n_classes,
            label_vocabulary,
            logits_dimension=n_classes,
            weight_column=weight_column,
            loss_reduction=loss_reduction,
            loss_fn=loss_fn,
            name=name,
        )

    def _all_predictions(self, logits: Tensor) -> dict[str, Any]:
        ids = tf.argmax(logits, axis=-1)[:, tf.newaxis]
        return {
            "logits": logits,
            "probabilities": tf.nn.softmax(logits, name="probabilities"),
            "class_ids": ids,
            "classes": names_of(ids, self._vocabulary),
            **self._every_class(logits),
        }

    def _outputs(self, predictions: dict[str, Any]) -> dict[str, Any]:
        return self._classification(predictions)

    def _processed(self, labels: Tensor) -> Tensor:
        labels = as_columns("labels", labels, 1)
        if self._vocabulary is not None:
            return ids_of(labels, self._vocabulary)
        if not labels.dtype.is_integer:
            raise ConfigError(
                f"The labels are of {labels.dtype}, but n_classes={self._n_classes} needs whole "
                "numbers, or strings with label_vocabulary."
            )
        return within(tf.cast(labels, tf.int64), self._n_classes)

    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels[:, 0], logits)
        return losses[:, tf.newaxis]

    def _metrics(self, labels: Tensor, logits: Tensor, weights: Tensor | float) -> dict[str, Any]:
        predicted = tf.argmax(logits, axis=-1)[:, tf.newaxis]
        by_example = tf.ones_like(labels, dtype=tf.float32) * weights
        return {"accuracy": tf1.metrics.accuracy(labels, predicted, by_example)}


def classifier_head(
    n_classes: int,
    weight_column: str | FeatureColumn | None,
    label_vocabulary: Sequence[str] | None,
    loss_reduction: str,
) -> Head:
    """The head of a classifier with so many classes, 2 or more.

    Raises:
        ConfigError: for fewer.
    """
    check_number("n_classes", n_classes, 2)
    if n_classes == 2:
        return BinaryClassHead(
            weight_column, label_vocabulary=label_vocabulary, loss_reduction=loss_reduction
        )
    return MultiClassHead(n_classes, weight_column, label_vocabulary, loss_reduction)
