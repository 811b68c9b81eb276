"""Deep networks: `DNNEstimator`, `DNNClassifier`, `DNNRegressor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.estimator.canned.base import CannedEstimator, Part
from tfdist.estimator.canned.class_heads import classifier_head
from tfdist.estimator.canned.columns import checked_columns
from tfdist.estimator.canned.head import SUM_OVER_BATCH_SIZE, Head
from tfdist.estimator.canned.networks import Deep
from tfdist.estimator.canned.regression_head import RegressionHead
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.warm_starting import WarmStartSettings
from tfdist.types import FeatureColumn, OptimizerChoice, Partitioner

__all__ = ["DNNClassifier", "DNNEstimator", "DNNRegressor"]

#: Of optimizers given by name, as in TensorFlow 2. TensorFlow 1 had 0.05.
_LEARNING_RATE = 0.001


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
        part = Part(network, "optimizer", optimizer, _LEARNING_RATE)
        super().__init__(head, [part], model_dir, config, warm_start_from)


class DNNClassifier(DNNEstimator):
    """A network of dense layers that classifies.

    Args:
        hidden_units: see `DNNEstimator`.
        feature_columns: see `DNNEstimator`.
        model_dir: see `DNNEstimator`.
        n_classes: the number of classes, 2 or more.
        weight_column: a feature with the weights of examples; its name or a numeric column.
        label_vocabulary: the names of the classes in order, if labels are strings.
        optimizer: see `DNNEstimator`.
        activation_fn: see `DNNEstimator`.
        dropout: see `DNNEstimator`.
        config: see `DNNEstimator`.
        warm_start_from: see `DNNEstimator`.
        loss_reduction: how losses of examples become one, `"sum_over_batch_size"` or `"sum"`.
        batch_norm: see `DNNEstimator`.
        input_layer_partitioner: see `DNNEstimator`.
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
        super().__init__(
            classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction),
            hidden_units,
            feature_columns,
            model_dir,
            optimizer,
            activation_fn,
            dropout,
            config,
            warm_start_from,
            batch_norm,
            input_layer_partitioner,
        )


class DNNRegressor(DNNEstimator):
    """A network of dense layers that predicts numbers.

    Args:
        hidden_units: see `DNNEstimator`.
        feature_columns: see `DNNEstimator`.
        model_dir: see `DNNEstimator`.
        label_dimension: how many numbers are predicted for an example.
        weight_column: see `DNNClassifier`.
        optimizer: see `DNNEstimator`.
        activation_fn: see `DNNEstimator`.
        dropout: see `DNNEstimator`.
        config: see `DNNEstimator`.
        warm_start_from: see `DNNEstimator`.
        loss_reduction: see `DNNClassifier`.
        batch_norm: see `DNNEstimator`.
        input_layer_partitioner: see `DNNEstimator`.
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
        super().__init__(
            RegressionHead(label_dimension, weight_column, loss_reduction),
            hidden_units,
            feature_columns,
            model_dir,
            optimizer,
            activation_fn,
            dropout,
            config,
            warm_start_from,
            batch_norm,
            input_layer_partitioner,
        )
