"""Wide and deep models: `DNNLinearCombinedEstimator`, `…Classifier`, `…Regressor`.

Source: Cheng et al., Wide & Deep Learning for Recommender Systems, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.canned.base import CannedEstimator, Part
from tfdist.estimator.canned.class_heads import classifier_head
from tfdist.estimator.canned.columns import checked_columns
from tfdist.estimator.canned.head import SUM_OVER_BATCH_SIZE, Head
from tfdist.estimator.canned.networks import Deep, Linear
from tfdist.estimator.canned.regression_head import RegressionHead
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.warm_starting import WarmStartSettings
from tfdist.types import FeatureColumn, OptimizerChoice, Partitioner

__all__ = [
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator",
    "DNNLinearCombinedRegressor",
]

#: Of optimizers given by name, as it was.
_DNN_LEARNING_RATE = 0.001
_LINEAR_LEARNING_RATE = 0.005


class DNNLinearCombinedEstimator(CannedEstimator):
    """A linear model and a deep network whose logits are added, with any head.

    Args:
        head: one of `tfdist.estimator`'s heads.
        model_dir: where checkpoints, event files and exports go.
        linear_feature_columns: the inputs of the linear model; None for no linear model.
        linear_optimizer: a name, an optimizer of `tf.compat.v1.train` or Keras, or a function that
            returns one. Names have the lesser of 0.005 and one over the square root of the number
            of columns as their learning rate.
        dnn_feature_columns: the inputs of the network, dense columns; None for no network.
        dnn_optimizer: as `linear_optimizer`; names have a learning rate of 0.001.
        dnn_hidden_units: the width of each hidden layer.
        dnn_activation_fn: of hidden layers.
        dnn_dropout: the share of a hidden layer's values that are dropped in training.
        config: a `RunConfig`.
        batch_norm: whether hidden layers are normalized, after activation and dropout.
        linear_sparse_combiner: how the categories of one example are combined.
        warm_start_from: a path, or `WarmStartSettings`, of a model to start from.
        input_layer_partitioner: splits tables of embeddings and linear weights.

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
            parts.append(Part(deep, "dnn_optimizer", dnn_optimizer, _DNN_LEARNING_RATE))
        if linear_feature_columns:
            columns = checked_columns("linear_feature_columns", linear_feature_columns)
            wide = Linear(columns, linear_sparse_combiner, input_layer_partitioner)
            rate = min(_LINEAR_LEARNING_RATE, 1 / math.sqrt(len(columns)))
            parts.append(Part(wide, "linear_optimizer", linear_optimizer, rate))
        if not parts:
            raise ConfigError(
                "Neither linear_feature_columns nor dnn_feature_columns has a column. Give one "
                "of them, or use a Baseline estimator."
            )
        super().__init__(head, parts, model_dir, config, warm_start_from)


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
    """A linear model and a deep network that classify together.

    Args:
        model_dir: see `DNNLinearCombinedEstimator`.
        linear_feature_columns: see `DNNLinearCombinedEstimator`.
        linear_optimizer: see `DNNLinearCombinedEstimator`.
        dnn_feature_columns: see `DNNLinearCombinedEstimator`.
        dnn_optimizer: see `DNNLinearCombinedEstimator`.
        dnn_hidden_units: see `DNNLinearCombinedEstimator`.
        dnn_activation_fn: see `DNNLinearCombinedEstimator`.
        dnn_dropout: see `DNNLinearCombinedEstimator`.
        n_classes: the number of classes, 2 or more.
        weight_column: a feature with the weights of examples; its name or a numeric column.
        label_vocabulary: the names of the classes in order, if labels are strings.
        config: see `DNNLinearCombinedEstimator`.
        warm_start_from: see `DNNLinearCombinedEstimator`.
        loss_reduction: how losses of examples become one, `"sum_over_batch_size"` or `"sum"`.
        batch_norm: see `DNNLinearCombinedEstimator`.
        linear_sparse_combiner: see `DNNLinearCombinedEstimator`.
        input_layer_partitioner: see `DNNLinearCombinedEstimator`.
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
        super().__init__(
            classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction),
            model_dir,
            linear_feature_columns,
            linear_optimizer,
            dnn_feature_columns,
            dnn_optimizer,
            dnn_hidden_units,
            dnn_activation_fn,
            dnn_dropout,
            config,
            batch_norm,
            linear_sparse_combiner,
            warm_start_from,
            input_layer_partitioner,
        )


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
    """A linear model and a deep network that predict numbers together.

    Args:
        model_dir: see `DNNLinearCombinedEstimator`.
        linear_feature_columns: see `DNNLinearCombinedEstimator`.
        linear_optimizer: see `DNNLinearCombinedEstimator`.
        dnn_feature_columns: see `DNNLinearCombinedEstimator`.
        dnn_optimizer: see `DNNLinearCombinedEstimator`.
        dnn_hidden_units: see `DNNLinearCombinedEstimator`.
        dnn_activation_fn: see `DNNLinearCombinedEstimator`.
        dnn_dropout: see `DNNLinearCombinedEstimator`.
        label_dimension: how many numbers are predicted for an example.
        weight_column: see `DNNLinearCombinedClassifier`.
        config: see `DNNLinearCombinedEstimator`.
        warm_start_from: see `DNNLinearCombinedEstimator`.
        loss_reduction: see `DNNLinearCombinedClassifier`.
        batch_norm: see `DNNLinearCombinedEstimator`.
        linear_sparse_combiner: see `DNNLinearCombinedEstimator`.
        input_layer_partitioner: see `DNNLinearCombinedEstimator`.
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
        super().__init__(
            RegressionHead(label_dimension, weight_column, loss_reduction),
            model_dir,
            linear_feature_columns,
            linear_optimizer,
            dnn_feature_columns,
            dnn_optimizer,
            dnn_hidden_units,
            dnn_activation_fn,
            dnn_dropout,
            config,
            batch_norm,
            linear_sparse_combiner,
            warm_start_from,
            input_layer_partitioner,
        )
