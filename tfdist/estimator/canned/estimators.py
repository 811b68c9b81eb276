"""Estimators with ready-made models: deep, linear, both, and none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.canned.base import CannedEstimator, Part
from tfdist.estimator.canned.columns import checked_columns
from tfdist.estimator.canned.head import SUM_OVER_BATCH_SIZE, Head
from tfdist.estimator.canned.heads import RegressionHead, classifier_head
from tfdist.estimator.canned.networks import Baseline, Deep, Linear
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.warm_starting import WarmStartSettings
from tfdist.types import FeatureColumn, Optimizer1, OptimizerChoice, Partitioner

__all__ = [
    "BaselineClassifier",
    "BaselineEstimator",
    "BaselineRegressor",
    "DNNClassifier",
    "DNNEstimator",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "LinearClassifier",
    "LinearEstimator",
    "LinearRegressor",
]

#: Learning rates of optimizers given by name, as in TensorFlow 2.
_BASELINE_RATE = 0.3
_LINEAR_RATE = 0.2
_DNN_RATE = 0.001  # TensorFlow 1 had 0.05.
_COMBINED_LINEAR_RATE = 0.005


class BaselineEstimator(CannedEstimator):
    """The same prediction for all examples, which is what a model must be better than.

    Args:
        head: one of `tfdist.estimator`'s heads.
        model_dir: where checkpoints, event files and exports go.
        optimizer: a name, an optimizer of `tf.compat.v1.train` or Keras, or a function that
            returns one. Names have a learning rate of 0.3.
        config: a `RunConfig`.

    Raises:
        ConfigError: for arguments that mean nothing.
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | Path | None = None,
        optimizer: OptimizerChoice = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        part = Part(Baseline(), "optimizer", optimizer, _BASELINE_RATE)
        super().__init__(head, [part], model_dir, config)


class BaselineClassifier(BaselineEstimator):
    """The share of each class, for all examples.

    Args:
        n_classes: the number of classes, 2 or more.
        weight_column: a feature with the weights of examples; its name or a numeric column.
        label_vocabulary: the names of the classes in order, if labels are strings.
        loss_reduction: how losses of examples become one, `"sum_over_batch_size"` or `"sum"`.

    The other arguments are those of `BaselineEstimator`.
    """

    def __init__(
        self,
        model_dir: str | Path | None = None,
        n_classes: int = 2,
        weight_column: str | FeatureColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerChoice = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
    ) -> None:
        head = classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(head, model_dir, optimizer, config)


class BaselineRegressor(BaselineEstimator):
    """The mean label, for all examples.

    Args:
        label_dimension: how many numbers are predicted for an example.

    The other arguments are those of `BaselineEstimator` and `BaselineClassifier`.
    """

    def __init__(
        self,
        model_dir: str | Path | None = None,
        label_dimension: int = 1,
        weight_column: str | FeatureColumn | None = None,
        optimizer: OptimizerChoice = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        super().__init__(head, model_dir, optimizer, config)


class LinearEstimator(CannedEstimator):
    """A linear model, with any head.

    Args:
        head: one of `tfdist.estimator`'s heads.
        feature_columns: feature columns, dense or categorical.
        model_dir: where checkpoints, event files and exports go.
        optimizer: a name, an optimizer of `tf.compat.v1.train` or Keras, or a function that
            returns one. Names have a learning rate of 0.2. None is Ftrl with the lesser of 0.2 and
            one over the square root of the number of columns.
        config: a `RunConfig`.
        sparse_combiner: how the categories of one example are combined: `"sum"`, `"mean"` or
            `"sqrtn"`.
        warm_start_from: a path, or `WarmStartSettings`, of a model to start from.
        partitioner: splits weights; by default those of more than 64 MiB are split over several
            parameter servers.

    Raises:
        ConfigError: for arguments that mean nothing.
    """

    def __init__(
        self,
        head: Head,
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | Path | None = None,
        optimizer: OptimizerChoice = "Ftrl",
        config: RunConfig | None = None,
        sparse_combiner: str = "sum",
        warm_start_from: str | WarmStartSettings | None = None,
        partitioner: Partitioner | None = None,
    ) -> None:
        columns = checked_columns("feature_columns", feature_columns)
        network = Linear(columns, sparse_combiner, partitioner)
        if optimizer is None:
            least = min(_LINEAR_RATE, 1 / math.sqrt(len(columns)))

            def optimizer() -> Optimizer1:
                return tf.compat.v1.train.FtrlOptimizer(least)

        part = Part(network, "optimizer", optimizer, _LINEAR_RATE)
        super().__init__(head, [part], model_dir, config, warm_start_from)


class LinearClassifier(LinearEstimator):
    """A linear model that classifies.

    The arguments are those of `LinearEstimator` and `BaselineClassifier`.
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | Path | None = None,
        n_classes: int = 2,
        weight_column: str | FeatureColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerChoice = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        sparse_combiner: str = "sum",
        partitioner: Partitioner | None = None,
    ) -> None:
        head = classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        options = (config, sparse_combiner, warm_start_from, partitioner)
        super().__init__(head, feature_columns, model_dir, optimizer, *options)


class LinearRegressor(LinearEstimator):
    """A linear model that predicts numbers.

    The arguments are those of `LinearEstimator` and `BaselineRegressor`.
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | Path | None = None,
        label_dimension: int = 1,
        weight_column: str | FeatureColumn | None = None,
        optimizer: OptimizerChoice = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        sparse_combiner: str = "sum",
        partitioner: Partitioner | None = None,
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        options = (config, sparse_combiner, warm_start_from, partitioner)
        super().__init__(head, feature_columns, model_dir, optimizer, *options)


class DNNEstimator(CannedEstimator):
    """A network of dense layers, with any head.

    Args:
        head: one of `tfdist.estimator`'s heads.
        hidden_units: the width of each hidden layer.
        feature_columns: dense feature columns.
        model_dir: where checkpoints, event files and exports go.
        optimizer: a name, an optimizer of `tf.compat.v1.train` or Keras, or a function that
            returns one. Names have a learning rate of 0.001.
        activation_fn: of hidden layers.
        dropout: the share of a hidden layer's values that are dropped in training.
        config: a `RunConfig`.
        warm_start_from: a path, or `WarmStartSettings`, of a model to start from.
        batch_norm: whether hidden layers are normalized, after activation and dropout.
        input_layer_partitioner: splits tables of embeddings; by default those of more than 64 MiB
            are split over several parameter servers.

    Raises:
        ConfigError: for arguments that mean nothing.
    """

    def __init__(
        self,
        head: Head,
        hidden_units: Sequence[int],
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | Path | None = None,
        optimizer: OptimizerChoice = "Adagrad",
        activation_fn: Callable[[Any], Any] | None = tf.nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        batch_norm: bool = False,
        input_layer_partitioner: Partitioner | None = None,
    ) -> None:
        columns = checked_columns("feature_columns", feature_columns)
        network = Deep(
            hidden_units, columns, activation_fn, dropout, batch_norm, input_layer_partitioner
        )
        part = Part(network, "optimizer", optimizer, _DNN_RATE)
        super().__init__(head, [part], model_dir, config, warm_start_from)


class DNNClassifier(DNNEstimator):
    """A network of dense layers that classifies.

    The arguments are those of `DNNEstimator` and `BaselineClassifier`.
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | Path | None = None,
        n_classes: int = 2,
        weight_column: str | FeatureColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerChoice = "Adagrad",
        activation_fn: Callable[[Any], Any] | None = tf.nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
        input_layer_partitioner: Partitioner | None = None,
    ) -> None:
        head = classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        options = (dropout, config, warm_start_from, batch_norm, input_layer_partitioner)
        super().__init__(
            head, hidden_units, feature_columns, model_dir, optimizer, activation_fn, *options
        )


class DNNRegressor(DNNEstimator):
    """A network of dense layers that predicts numbers.

    The arguments are those of `DNNEstimator` and `BaselineRegressor`.
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | Path | None = None,
        label_dimension: int = 1,
        weight_column: str | FeatureColumn | None = None,
        optimizer: OptimizerChoice = "Adagrad",
        activation_fn: Callable[[Any], Any] | None = tf.nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
        input_layer_partitioner: Partitioner | None = None,
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        options = (dropout, config, warm_start_from, batch_norm, input_layer_partitioner)
        super().__init__(
            head, hidden_units, feature_columns, model_dir, optimizer, activation_fn, *options
        )


class DNNLinearCombinedEstimator(CannedEstimator):
    """A linear model and a deep network whose logits are added, with any head.

    Source: Cheng et al., Wide & Deep Learning for Recommender Systems, 2016.

    Args:
        head: one of `tfdist.estimator`'s heads.
        model_dir: where checkpoints, event files and exports go.
        linear_feature_columns: the inputs of the linear model; None for no linear model.
        linear_optimizer: a name, an optimizer of `tf.compat.v1.train` or Keras, or a function that
            returns one. Names have the lesser of 0.005 and one over the square root of the number
            of columns as their learning rate.
        dnn_feature_columns: the inputs of the network, dense columns; None for no network.
        dnn_optimizer: as `linear_optimizer`; names have a learning rate of 0.001.
        input_layer_partitioner: splits tables of embeddings and linear weights.

    The other arguments are those of `DNNEstimator` and `LinearEstimator`.

    Raises:
        ConfigError: for arguments that mean nothing, or if there is no column at all.
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | Path | None = None,
        linear_feature_columns: Iterable[FeatureColumn] | None = None,
        linear_optimizer: OptimizerChoice = "Ftrl",
        dnn_feature_columns: Iterable[FeatureColumn] | None = None,
        dnn_optimizer: OptimizerChoice = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Callable[[Any], Any] | None = tf.nn.relu,
        dnn_dropout: float | None = None,
        config: RunConfig | None = None,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
        warm_start_from: str | WarmStartSettings | None = None,
        input_layer_partitioner: Partitioner | None = None,
    ) -> None:
        parts = []
        if dnn_feature_columns:
            if not dnn_hidden_units:
                raise ConfigError(
                    f"dnn_hidden_units={dnn_hidden_units!r} conflicts with dnn_feature_columns. "
                    "Give the widths of the hidden layers."
                )
            columns = checked_columns("dnn_feature_columns", dnn_feature_columns)
            deep = Deep(
                dnn_hidden_units,
                columns,
                dnn_activation_fn,
                dnn_dropout,
                batch_norm,
                input_layer_partitioner,
            )
            parts.append(Part(deep, "dnn_optimizer", dnn_optimizer, _DNN_RATE))
        if linear_feature_columns:
            columns = checked_columns("linear_feature_columns", linear_feature_columns)
            wide = Linear(columns, linear_sparse_combiner, input_layer_partitioner)
            rate = min(_COMBINED_LINEAR_RATE, 1 / math.sqrt(len(columns)))
            parts.append(Part(wide, "linear_optimizer", linear_optimizer, rate))
        if not parts:
            raise ConfigError(
                "Neither linear_feature_columns nor dnn_feature_columns has a column. Give one "
                "of them, or use a Baseline estimator."
            )
        super().__init__(head, parts, model_dir, config, warm_start_from)


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
    """A linear model and a deep network that classify together.

    The arguments are those of `DNNLinearCombinedEstimator` and `BaselineClassifier`.
    """

    def __init__(
        self,
        model_dir: str | Path | None = None,
        linear_feature_columns: Iterable[FeatureColumn] | None = None,
        linear_optimizer: OptimizerChoice = "Ftrl",
        dnn_feature_columns: Iterable[FeatureColumn] | None = None,
        dnn_optimizer: OptimizerChoice = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Callable[[Any], Any] | None = tf.nn.relu,
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: str | FeatureColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
        input_layer_partitioner: Partitioner | None = None,
    ) -> None:
        head = classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        options = (batch_norm, linear_sparse_combiner, warm_start_from, input_layer_partitioner)
        super().__init__(
            head,
            model_dir,
            linear_feature_columns,
            linear_optimizer,
            dnn_feature_columns,
            dnn_optimizer,
            dnn_hidden_units,
            dnn_activation_fn,
            dnn_dropout,
            config,
            *options,
        )


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
    """A linear model and a deep network that predict numbers together.

    The arguments are those of `DNNLinearCombinedEstimator` and `BaselineRegressor`.
    """

    def __init__(
        self,
        model_dir: str | Path | None = None,
        linear_feature_columns: Iterable[FeatureColumn] | None = None,
        linear_optimizer: OptimizerChoice = "Ftrl",
        dnn_feature_columns: Iterable[FeatureColumn] | None = None,
        dnn_optimizer: OptimizerChoice = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Callable[[Any], Any] | None = tf.nn.relu,
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: str | FeatureColumn | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
        input_layer_partitioner: Partitioner | None = None,
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        options = (batch_norm, linear_sparse_combiner, warm_start_from, input_layer_partitioner)
        super().__init__(
            head,
            model_dir,
            linear_feature_columns,
            linear_optimizer,
            dnn_feature_columns,
            dnn_optimizer,
            dnn_hidden_units,
            dnn_activation_fn,
            dnn_dropout,
            config,
            *options,
        )
