"""Feature columns: the input of a network or a linear model, and the parsing of examples.

The variables have the names of the retired Estimators: `input_layer/COLUMN/embedding_weights`,
`linear_model/COLUMN/weights` and `linear_model/bias_weights`, in the scope of the caller.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist._tf.sessions import (
    CategoricalColumn,
    DenseColumn,
    FeatureTransformationCache,
    SharedEmbeddingColumn,
    StateManager,
)
from tfdist.errors import ConfigError
from tfdist.estimator.modeling import without_deprecations
from tfdist.types import DType, FeatureColumn, Features, SparseTensor, Tensor, Variable

__all__ = [
    "checked_columns",
    "classifier_parse_example_spec",
    "input_layer",
    "linear_model",
    "regressor_parse_example_spec",
]

tf1 = tf.compat.v1


def checked_columns(what: str, columns: Any) -> tuple[Any, ...]:
    """Feature columns as a tuple, sorted by their names as the retired Estimators did.

    `what` is the argument that gave them, for messages.

    Raises:
        ConfigError: if there are none, two of one name, or something that is not a column.
    """
    if isinstance(columns, Mapping):
        raise ConfigError(f"{what} is a dictionary. Give a list of tf.feature_column columns.")
    several = isinstance(columns, Iterable) and not hasattr(columns, "parse_example_spec")
    listed = tuple(columns) if several else (columns,)
    if not listed:
        raise ConfigError(f"{what} is empty. Give at least one column of tf.feature_column.")
    for column in listed:
        if not isinstance(column, DenseColumn | CategoricalColumn) and not _is_old(column):
            raise ConfigError(
                f"{what} holds {column!r}, which is not a feature column. Make columns with "
                "tf.feature_column, such as tf.feature_column.numeric_column('age')."
            )
    names = [column.name for column in listed]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"{what} holds two columns named {twice[0]!r}. Leave one out, or give the feature "
            "under a second name."
        )
    return tuple(sorted(listed, key=lambda column: column.name))


def input_layer(features: Features, columns: Sequence[Any]) -> Tensor:
    """Concatenates dense columns, in the order of their names, to a float tensor `(batch, width)`.

    Raises:
        ConfigError: if a column is categorical, or the features are not a dictionary.
    """
    for column in columns:
        if not isinstance(column, DenseColumn) and not _is_old(column):
            raise ConfigError(
                f"The column {column.name!r} is categorical and cannot be the input of a network. "
                "Wrap it in tf.feature_column.embedding_column or indicator_column."
            )
    features = _dictionary(features)
    outputs: dict[Any, Any] = {}
    if old := [column for column in columns if _is_old(column)]:
        with without_deprecations():
            tf1.feature_column.input_layer(features, old, cols_to_output_tensors=outputs)
    cache, state = FeatureTransformationCache(features), _Variables()
    with tf1.variable_scope("input_layer"):
        for column in columns:
            if column not in outputs:
                outputs[column] = _dense(column, cache, state)
    return tf.concat([outputs[column] for column in columns], axis=1)


def linear_model(
    features: Features, columns: Sequence[Any], units: int, sparse_combiner: str = "sum"
) -> Tensor:
    """The weighted sums of all columns, plus a bias: a float tensor `(batch, units)`.

    Weights of several categories in one example are combined by `"sum"`, `"mean"` or `"sqrtn"`.

    Raises:
        ConfigError: if a column is shared by the old API, or the features are not a dictionary.
    """
    cache, state = FeatureTransformationCache(_dictionary(features)), _Variables()
    zeros = tf1.zeros_initializer()
    with tf1.variable_scope("linear_model"):
        sums = []
        for column in columns:
            if _is_old(column):
                raise ConfigError(
                    f"A linear model cannot use {column.name!r}, a column of tf.compat.v1. Make it "
                    "with tf.feature_column.shared_embeddings."
                )
            sums.append(_weighted_sum(column, cache, state, units, sparse_combiner))
        bias = tf1.get_variable("bias_weights", [units], initializer=zeros)
        return tf.nn.bias_add(tf.add_n(sums), bias)


def _weighted_sum(
    column: FeatureColumn, cache: object, state: object, units: int, combiner: str
) -> Tensor:
    """One column's part of a linear model. A bucketized column is both kinds; it is categorical."""
    categorical = isinstance(column, CategoricalColumn)
    size = column.num_buckets if categorical else column.variable_shape.num_elements()
    dense = None if categorical else _dense(column, cache, state)
    with tf1.variable_scope(_scope_name(column)):
        if categorical:
            column.create_state(state)
        weights = tf1.get_variable("weights", [size, units], initializer=tf1.zeros_initializer())
        if dense is not None:
            return tf.matmul(dense, tf.convert_to_tensor(weights))
        pair = column.get_sparse_tensors(cache, state)
        return tf1.nn.safe_embedding_lookup_sparse(
            weights, _flat(pair.id_tensor), _flat(pair.weight_tensor), combiner=combiner
        )


def _dense(column: FeatureColumn, cache: object, state: object) -> Tensor:
    """The tensor `(batch, width)` of a dense column."""
    # A shared table is made where it is used first, so it must not be in one column's scope.
    shared = isinstance(column, SharedEmbeddingColumn)
    with contextlib.nullcontext() if shared else tf1.variable_scope(_scope_name(column)):
        column.create_state(state)
        tensor = column.get_dense_tensor(cache, state)
    return tf.reshape(tensor, [tf.shape(tensor)[0], column.variable_shape.num_elements()])


def _flat(sparse: SparseTensor | None) -> SparseTensor | None:
    """A sparse tensor of any rank as `(batch, values)`; None stays None."""
    if sparse is None:
        return None
    return tf.sparse.reshape(sparse, [tf.shape(sparse)[0], -1])


def _dictionary(features: Features) -> dict[Any, Any]:
    if isinstance(features, Mapping):
        return dict(features)
    raise ConfigError(
        f"The features are {type(features).__name__}, not a dictionary. Let input_fn return "
        "features by the names that the feature columns use."
    )


def _scope_name(column: FeatureColumn) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", column.name)


def _is_old(column: FeatureColumn) -> bool:
    """Whether a column is of TensorFlow 1 only, as those of `shared_embedding_columns`."""
    new = isinstance(column, DenseColumn | CategoricalColumn)
    return not new and hasattr(column, "name") and hasattr(column, "_get_dense_tensor")


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
    return _parse_spec(feature_columns, label_key, label, weight_column)


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
    return _parse_spec(feature_columns, label_key, label, weight_column)


def _parse_spec(
    columns: Iterable[FeatureColumn],
    label_key: str,
    label: object,
    weight_column: str | FeatureColumn | None,
) -> dict[str, Any]:
    columns = checked_columns("feature_columns", columns)
    made: dict[str, Any] = dict(tf.feature_column.make_parse_example_spec(columns))
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


class _Variables(StateManager):  # type: ignore[misc]
    """Keeps the weights that columns make as variables of the graph, named by the open scopes."""

    def __init__(self) -> None:
        self._variables: dict[tuple[Any, str], Any] = {}
        self._resources: dict[tuple[Any, str], Any] = {}

    def create_variable(
        self,
        feature_column: FeatureColumn,
        name: str,
        shape: Sequence[int],
        dtype: DType | None = None,
        trainable: bool = True,
        use_resource: bool = True,
        initializer: object = None,
    ) -> Variable:
        variable = tf1.get_variable(
            name,
            shape,
            dtype or tf.float32,
            initializer,
            trainable=trainable,
            use_resource=use_resource,
        )
        self._variables[feature_column, name] = variable
        return variable

    def get_variable(self, feature_column: FeatureColumn, name: str) -> Variable:
        return self._variables[feature_column, name]

    def add_resource(self, feature_column: FeatureColumn, name: str, resource: object) -> None:
        self._resources[feature_column, name] = resource

    def has_resource(self, feature_column: FeatureColumn, name: str) -> bool:
        return (feature_column, name) in self._resources

    def get_resource(self, feature_column: FeatureColumn, name: str) -> object:
        return self._resources[feature_column, name]
