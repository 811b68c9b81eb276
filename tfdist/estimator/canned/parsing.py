"""Feature specifications for `tf.io.parse_example`: features and label of serialized examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.canned.columns import checked_columns
from tfdist.types import DType, FeatureColumn

__all__ = ["classifier_parse_example_spec", "regressor_parse_example_spec"]


def classifier_parse_example_spec(
    feature_columns: Iterable[FeatureColumn],
    label_key: str,
    label_dtype: DType = tf.int64,
    label_default: object = None,
    weight_column: str | FeatureColumn | None = None,
) -> dict[str, Any]:
    """The specification of a classifier's examples.

    Args:
        feature_columns: the estimator's columns.
        label_key: the label's name.
        label_dtype: int64, or string if there is a `label_vocabulary`.
        label_default: the label if there is none.
        weight_column: the name or numeric column of the weights.

    Raises:
        ConfigError: if the label or the weights have the name of a feature.
    """
    label = tf.io.FixedLenFeature((1,), label_dtype, label_default)
    return _spec(feature_columns, label_key, label, weight_column)


def regressor_parse_example_spec(
    feature_columns: Iterable[FeatureColumn],
    label_key: str,
    label_dtype: DType = tf.float32,
    label_default: object = None,
    label_dimension: int = 1,
    weight_column: str | FeatureColumn | None = None,
) -> dict[str, Any]:
    """The specification of a regressor's examples; see `classifier_parse_example_spec`."""
    label = tf.io.FixedLenFeature((label_dimension,), label_dtype, label_default)
    return _spec(feature_columns, label_key, label, weight_column)


def _spec(
    columns: Iterable[FeatureColumn],
    label_key: str,
    label: object,
    weight_column: str | FeatureColumn | None,
) -> dict[str, Any]:
    made = dict(
        tf.feature_column.make_parse_example_spec(checked_columns("feature_columns", columns))
    )
    added = {label_key: label}
    if weight_column is not None:
        key = weight_column if isinstance(weight_column, str) else weight_column.key
        added[key] = tf.io.FixedLenFeature((1,), tf.float32)
    for key, feature in added.items():
        if key in made:
            raise ConfigError(
                f"label_key or weight_column is {key!r}, which conflicts with a feature column of "
                "that name. Rename one of them."
            )
        made[key] = feature
    return made
