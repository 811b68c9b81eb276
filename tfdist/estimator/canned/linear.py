"""Linear models: `LinearEstimator`, `LinearClassifier`, `LinearRegressor`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import tensorflow as tf

from tfdist.estimator.canned.base import CannedEstimator, Part
from tfdist.estimator.canned.class_heads import classifier_head
from tfdist.estimator.canned.columns import checked_columns
from tfdist.estimator.canned.head import SUM_OVER_BATCH_SIZE, Head
from tfdist.estimator.canned.networks import Linear
from tfdist.estimator.canned.regression_head import RegressionHead
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.warm_starting import WarmStartSettings
from tfdist.types import FeatureColumn, Optimizer1, OptimizerChoice, Partitioner

__all__ = ["LinearClassifier", "LinearEstimator", "LinearRegressor"]

#: Of optimizers given by name, as it was.
_LEARNING_RATE = 0.2


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
            least = min(_LEARNING_RATE, 1 / math.sqrt(len(columns)))

            def optimizer() -> Optimizer1:
                return tf.compat.v1.train.FtrlOptimizer(least)

        part = Part(network, "optimizer", optimizer, _LEARNING_RATE)
        super().__init__(head, [part], model_dir, config, warm_start_from)


class LinearClassifier(LinearEstimator):
    """A linear model that classifies.

    Args:
        feature_columns: see `LinearEstimator`.
        model_dir: see `LinearEstimator`.
        n_classes: the number of classes, 2 or more.
        weight_column: a feature with the weights of examples; its name or a numeric column.
        label_vocabulary: the names of the classes in order, if labels are strings.
        optimizer: see `LinearEstimator`.
        config: see `LinearEstimator`.
        warm_start_from: see `LinearEstimator`.
        loss_reduction: how losses of examples become one, `"sum_over_batch_size"` or `"sum"`.
        sparse_combiner: see `LinearEstimator`.
        partitioner: see `LinearEstimator`.
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
        super().__init__(
            classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction),
            feature_columns,
            model_dir,
            optimizer,
            config,
            sparse_combiner,
            warm_start_from,
            partitioner,
        )


class LinearRegressor(LinearEstimator):
    """A linear model that predicts numbers.

    Args:
        feature_columns: see `LinearEstimator`.
        model_dir: see `LinearEstimator`.
        label_dimension: how many numbers are predicted for an example.
        weight_column: see `LinearClassifier`.
        optimizer: see `LinearEstimator`.
        config: see `LinearEstimator`.
        warm_start_from: see `LinearEstimator`.
        loss_reduction: see `LinearClassifier`.
        sparse_combiner: see `LinearEstimator`.
        partitioner: see `LinearEstimator`.
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
        super().__init__(
            RegressionHead(label_dimension, weight_column, loss_reduction),
            feature_columns,
            model_dir,
            optimizer,
            config,
            sparse_combiner,
            warm_start_from,
            partitioner,
        )
