"""Baselines, which see no feature: `BaselineEstimator`, `BaselineClassifier`, `BaselineRegressor`.

They learn the mean of the labels, which is what a model must be better than.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfdist.estimator.canned.base import CannedEstimator, Part
from tfdist.estimator.canned.class_heads import classifier_head
from tfdist.estimator.canned.head import SUM_OVER_BATCH_SIZE, Head
from tfdist.estimator.canned.networks import Baseline
from tfdist.estimator.canned.regression_head import RegressionHead
from tfdist.estimator.run_config import RunConfig
from tfdist.types import FeatureColumn, OptimizerChoice

__all__ = ["BaselineClassifier", "BaselineEstimator", "BaselineRegressor"]

#: Of optimizers given by name, as it was.
_LEARNING_RATE = 0.3


class BaselineEstimator(CannedEstimator):
    """The same prediction for all examples, with any head.

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
        part = Part(Baseline(), "optimizer", optimizer, _LEARNING_RATE)
        super().__init__(head, [part], model_dir, config)


class BaselineClassifier(BaselineEstimator):
    """The share of each class, for all examples.

    Args:
        model_dir: see `BaselineEstimator`.
        n_classes: the number of classes, 2 or more.
        weight_column: a feature with the weights of examples; its name or a numeric column.
        label_vocabulary: the names of the classes in order, if labels are strings.
        optimizer: see `BaselineEstimator`.
        config: see `BaselineEstimator`.
        loss_reduction: how losses of examples become one, `"sum_over_batch_size"` or `"sum"`.
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
        model_dir: see `BaselineEstimator`.
        label_dimension: how many numbers are predicted for an example.
        weight_column: see `BaselineClassifier`.
        optimizer: see `BaselineEstimator`.
        config: see `BaselineEstimator`.
        loss_reduction: see `BaselineClassifier`.
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
