"""The heads of `tfdist.estimator`: two classes, one of several, any of several, numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.canned.head import SUM_OVER_BATCH_SIZE, Head, as_columns, mean
from tfdist.estimator.export import ClassificationOutput, RegressionOutput
from tfdist.types import FeatureColumn, SparseTensor, Tensor
from tfdist.utils.validation import check_number, check_range

__all__ = [
    "BinaryClassHead",
    "MultiClassHead",
    "MultiLabelHead",
    "RegressionHead",
    "classifier_head",
]

tf1 = tf.compat.v1


class _ClassHead(Head):
    """The base of heads whose examples belong to classes."""

    def __init__(
        self, n_classes: int, label_vocabulary: Sequence[str] | None, *others: Any
    ) -> None:
        super().__init__(*others)
        self._n_classes = n_classes
        self._vocabulary = _checked_vocabulary(label_vocabulary, n_classes)

    def _every_class(self, logits: Tensor) -> dict[str, Any]:
        """All classes, once for each example: what Serving's Classify answers with."""
        ids = tf.tile(tf.range(self._n_classes)[tf.newaxis], [tf.shape(logits)[0], 1])
        return {"all_class_ids": ids, "all_classes": self._names(ids)}

    def _of_one_class(self, logits: Tensor, scores: Tensor) -> dict[str, Any]:
        """Predictions of the class with the highest score."""
        ids = tf.argmax(scores, axis=-1)[:, tf.newaxis]
        return {
            "logits": logits,
            "probabilities": tf.nn.softmax(scores, name="probabilities"),
            "class_ids": ids,
            "classes": self._names(ids),
            **self._every_class(logits),
        }

    def _names(self, ids: Tensor) -> Tensor:
        """The names of classes; without a vocabulary their numbers as strings."""
        if self._vocabulary is None:
            return tf.strings.as_string(ids)
        return tf.gather(tf.constant(self._vocabulary), ids)

    def _outputs(self, predictions: dict[str, Any]) -> dict[str, Any]:
        output = ClassificationOutput(predictions["probabilities"], predictions["all_classes"])
        return {"serving_default": output, "classification": output}


class BinaryClassHead(_ClassHead):
    """Two classes, by one logit. Labels are 0 or 1, or two names, of shape `(batch, 1)`.

    Args:
        thresholds: probabilities from which on class 1 is predicted, for further metrics.
        label_vocabulary: the names of the classes 0 and 1.

    The other arguments are those of `Head`.
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
        self._thresholds = _checked_thresholds(thresholds)
        options = (weight_column, loss_reduction, loss_fn, name)
        super().__init__(2, label_vocabulary, 1, *options)

    def _all_predictions(self, logits: Tensor) -> dict[str, Any]:
        two = tf.concat([tf.zeros_like(logits), logits], axis=-1)
        logistic = tf.sigmoid(logits, name="logistic")
        return {**self._of_one_class(logits, two), "logistic": logistic}

    def _outputs(self, predictions: dict[str, Any]) -> dict[str, Any]:
        regression = RegressionOutput(predictions["logistic"])
        return {**super()._outputs(predictions), "regression": regression}

    def _processed(self, labels: Tensor) -> Tensor:
        labels = as_columns("labels", labels, 1)
        if self._vocabulary is not None:
            labels = _ids_of(labels, self._vocabulary)
        return _within(tf.cast(labels, tf.float32), 2)

    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        return tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)

    def _metrics(self, labels: Tensor, logits: Tensor, weights: Tensor | float) -> dict[str, Any]:
        probability = tf.sigmoid(logits)
        predicted = tf.cast(logits > 0, tf.float32)
        share, update = mean(labels, weights)
        return {
            "accuracy_baseline": (tf.maximum(share, 1 - share), update),
            "label/mean": mean(labels, weights),
            "prediction/mean": mean(probability, weights),
            **_hits(labels, predicted, weights),
            **_areas(labels, probability, weights),
            **_at_thresholds(labels, probability, weights, self._thresholds),
        }


class MultiClassHead(_ClassHead):
    """One of three or more classes. Labels are numbers or names, of shape `(batch, 1)`.

    Args:
        n_classes: the number of classes, 3 or more.
        label_vocabulary: the names of the classes in order.

    The other arguments are those of `Head`.
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
        options = (weight_column, loss_reduction, loss_fn, name)
        super().__init__(n_classes, label_vocabulary, n_classes, *options)

    def _all_predictions(self, logits: Tensor) -> dict[str, Any]:
        return self._of_one_class(logits, logits)

    def _processed(self, labels: Tensor) -> Tensor:
        labels = as_columns("labels", labels, 1)
        if self._vocabulary is not None:
            return _ids_of(labels, self._vocabulary)
        if not labels.dtype.is_integer:
            raise ConfigError(
                f"The labels are of {labels.dtype}, but n_classes={self._n_classes} needs whole "
                "numbers, or strings with label_vocabulary."
            )
        return _within(tf.cast(labels, tf.int64), self._n_classes)

    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels[:, 0], logits)
        return losses[:, tf.newaxis]

    def _metrics(self, labels: Tensor, logits: Tensor, weights: Tensor | float) -> dict[str, Any]:
        predicted = tf.argmax(logits, axis=-1)[:, tf.newaxis]
        by_example = tf.ones_like(labels, dtype=tf.float32) * weights
        return {"accuracy": tf1.metrics.accuracy(labels, predicted, by_example)}


class MultiLabelHead(_ClassHead):
    """Any of several classes, each by its own logit.

    Labels are 0 or 1 for each class, of shape `(batch, n_classes)`, or a `SparseTensor` of numbers
    or names of classes. An example's loss is the mean over its classes.

    Args:
        n_classes: the number of classes, 2 or more.
        thresholds: probabilities from which on a class is predicted, for further metrics.
        label_vocabulary: the names of the classes in order.
        classes_for_class_based_metrics: classes, by number or name, that get metrics of their own.

    The other arguments are those of `Head`.
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
        options = (weight_column, loss_reduction, loss_fn, name)
        super().__init__(n_classes, label_vocabulary, n_classes, *options)
        self._thresholds = _checked_thresholds(thresholds)
        self._own_metrics = [
            self._known_class(each) for each in classes_for_class_based_metrics or ()
        ]

    def _known_class(self, label: int | str) -> int:
        if isinstance(label, str) and label in (self._vocabulary or ()):
            return (self._vocabulary or ()).index(label)
        if isinstance(label, int) and 0 <= label < self._n_classes:
            return label
        raise ConfigError(
            f"classes_for_class_based_metrics has {label!r}, which is not a class. Give numbers "
            f"from 0 to {self._n_classes - 1}, or names of label_vocabulary."
        )

    def _all_predictions(self, logits: Tensor) -> dict[str, Any]:
        every = self._every_class(logits)
        return {
            "logits": logits,
            "probabilities": tf.sigmoid(logits, name="probabilities"),
            "classes": every["all_classes"],
            **every,
        }

    def _processed(self, labels: Tensor | SparseTensor) -> Tensor:
        if not isinstance(labels, tf.SparseTensor):
            labels = as_columns("labels", labels, self._n_classes)
            return _within(tf.cast(labels, tf.float32), 2)
        ids = labels.values
        if self._vocabulary is not None:
            ids = _ids_of(ids, self._vocabulary)
        ids = _within(tf.cast(ids, tf.int64), self._n_classes)
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
            **_areas(labels, probabilities, weights),
            **_at_thresholds(labels, probabilities, weights, self._thresholds),
        }
        for i in self._own_metrics:
            suffix = f"/{self._vocabulary[i]}" if self._vocabulary else f"/class{i}"
            one, probability = labels[:, i : i + 1], probabilities[:, i : i + 1]
            made[f"probability_mean{suffix}"] = mean(probability, weights)
            made |= _areas(one, probability, weights, suffix)
        return made


class RegressionHead(Head):
    """Numbers, by the squared error. Labels have the shape `(batch, label_dimension)`.

    Args:
        label_dimension: how many numbers are predicted for an example.
        inverse_link_fn: makes predictions of logits; by default they are the logits.

    The other arguments are those of `Head`.
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

    def _all_predictions(self, logits: Tensor) -> dict[str, Any]:
        if self._inverse_link_fn is None:
            return {"predictions": logits}
        return {"predictions": self._inverse_link_fn(logits), "logits": logits}

    def _outputs(self, predictions: dict[str, Any]) -> dict[str, Any]:
        output = RegressionOutput(predictions["predictions"])
        return {"serving_default": output, "regression": output}

    def _processed(self, labels: Tensor) -> Tensor:
        return tf.cast(as_columns("labels", labels, self.logits_dimension), tf.float32)

    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        return tf.math.squared_difference(labels, logits)

    def _metrics(self, labels: Tensor, logits: Tensor, weights: Tensor | float) -> dict[str, Any]:
        predicted = self.predictions(logits)["predictions"]
        return {
            "prediction/mean": mean(predicted, weights),
            "label/mean": mean(labels, weights),
        }


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


def _checked_vocabulary(vocabulary: Sequence[str] | None, n_classes: int) -> tuple[str, ...] | None:
    if vocabulary is None:
        return None
    if isinstance(vocabulary, str | dict) or not isinstance(vocabulary, Sequence):
        raise ConfigError(
            f"label_vocabulary={vocabulary!r} is no list. Give the names of all classes in order."
        )
    if len(vocabulary) != n_classes:
        raise ConfigError(
            f"label_vocabulary has {len(vocabulary)} names, which conflicts with "
            f"n_classes={n_classes}. Give one name for each class."
        )
    return tuple(vocabulary)


def _within(labels: Tensor, n_classes: int) -> Tensor:
    """Labels, checked when they are computed to be numbers from 0 to `n_classes` - 1."""
    limit = tf.cast(n_classes - 1, labels.dtype)
    message = f"Labels must be numbers from 0 to {n_classes - 1}."
    checks = [
        tf1.assert_less_equal(labels, limit, message=message),
        tf1.assert_non_negative(labels, message=message),
    ]
    with tf.control_dependencies(checks):
        return tf.identity(labels)


def _ids_of(names: Tensor, vocabulary: tuple[str, ...]) -> Tensor:
    """The numbers of names. One that is not in the vocabulary is an error when it comes."""
    if names.dtype != tf.string:
        raise ConfigError(
            f"The labels are of {names.dtype}, which conflicts with label_vocabulary. Give strings "
            "as labels, or leave label_vocabulary out."
        )
    numbers = tf.range(len(vocabulary), dtype=tf.int64)
    initializer = tf1.lookup.KeyValueTensorInitializer(tf.constant(vocabulary), numbers)
    ids = tf1.lookup.StaticHashTable(initializer, -1).lookup(names)
    message = f"A label is not in label_vocabulary ({', '.join(map(str, vocabulary))}):"
    known = tf1.assert_non_negative(ids, data=[message, names])
    with tf.control_dependencies([known]):
        return tf.identity(ids)


def _checked_thresholds(thresholds: Sequence[float] | None) -> tuple[float, ...]:
    for threshold in thresholds or ():
        check_range("thresholds", threshold, above=0, below=1)
    return tuple(thresholds or ())


def _areas(
    labels: Tensor, probabilities: Tensor, weights: Tensor | float, suffix: str = ""
) -> dict[str, Any]:
    """The areas under the ROC curve and the precision-recall curve, by 200 thresholds."""
    weights = tf.ones_like(probabilities) * weights
    curves = {
        "auc": {"curve": "ROC", "summation_method": "trapezoidal"},
        "auc_precision_recall": {"curve": "PR", "summation_method": "careful_interpolation"},
    }
    return {
        name + suffix: tf1.metrics.auc(labels, probabilities, weights, name=name, **options)
        for name, options in curves.items()
    }


def _at_thresholds(
    labels: Tensor, probabilities: Tensor, weights: Tensor | float, thresholds: Sequence[float]
) -> dict[str, Any]:
    """Accuracy, precision and recall of predicting 1 from each threshold on."""
    made: dict[str, Any] = {}
    for threshold in thresholds:
        predicted = tf.cast(probabilities > threshold, tf.float32)
        made |= _hits(labels, predicted, weights, f"/positive_threshold_{threshold:g}")
    return made


def _hits(
    labels: Tensor, predicted: Tensor, weights: Tensor | float, suffix: str = ""
) -> dict[str, Any]:
    weights = tf.ones_like(predicted) * weights
    return {
        f"accuracy{suffix}": tf1.metrics.accuracy(labels, predicted, weights),
        f"precision{suffix}": tf1.metrics.precision(labels, predicted, weights),
        f"recall{suffix}": tf1.metrics.recall(labels, predicted, weights),
    }
