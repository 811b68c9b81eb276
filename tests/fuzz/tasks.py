"""What programs learn, and with what: labels, losses, metrics, optimizers, callbacks."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of output.

    Attributes:
        labels: an expression for n labels.
        layer: the last layer, but for its name.
        losses: keys of `LOSSES`; the first is the simplest.
        metrics: expressions.
    """

    labels: str
    layer: str
    losses: tuple[str, ...]
    metrics: tuple[str, ...]


_NUMBERS = (
    "mse",
    "mae",
    "huber",
    "log_cosh",
    "cosine",
    "mape",
    "function",
    "lambda_rows",
    "lambda_mean",
    "lambda_sum",
    "lambda_root",
    "lambda_variance",
    "lambda_pairs",
)
_NUMBER_METRICS = (
    "'mae'",
    "keras.metrics.RootMeanSquaredError()",
    "keras.metrics.R2Score()",
    "keras.metrics.CosineSimilarity()",
    "keras.metrics.MeanAbsolutePercentageError()",
    "keras.metrics.LogCoshError()",
    "keras.metrics.PearsonCorrelation()",
    "keras.metrics.ConcordanceCorrelation()",
    "Largest()",
    "PerExample()",
    "lambda t, p: keras.ops.abs(t - p)",
    "batch_error",
    "keras.metrics.MeanMetricWrapper(keras.losses.huber, name='wrapped')",
)

TASKS: dict[str, Task] = {
    "number": Task(
        "rng.normal(size=({n}, 1)).astype('float32')", "layers.Dense(1", _NUMBERS, _NUMBER_METRICS
    ),
    "numbers": Task(
        "rng.normal(size=({n}, 3)).astype('float32')", "layers.Dense(3", _NUMBERS, _NUMBER_METRICS
    ),
    "positive": Task(
        "rng.uniform(0.1, 3.0, ({n}, 1)).astype('float32')",
        "layers.Dense(1, 'softplus'",
        ("poisson", "msle", "mape"),
        ("keras.metrics.Poisson()", "keras.metrics.MeanSquaredLogarithmicError()"),
    ),
    "binary": Task(
        "rng.integers(0, 2, ({n}, 1)).astype('float32')",
        "layers.Dense(1, 'sigmoid'",
        ("binary", "binary_focal", "hinge", "squared_hinge", "dice", "tversky"),
        (
            "'accuracy'",
            "keras.metrics.AUC(num_thresholds=20)",
            "keras.metrics.AUC(num_thresholds=20, curve='PR')",
            "keras.metrics.Precision(thresholds=[0.3, 0.7])",
            "keras.metrics.Recall()",
            "keras.metrics.BinaryIoU()",
            "keras.metrics.F1Score(threshold=0.5)",
            "keras.metrics.FalsePositives()",
            "keras.metrics.PrecisionAtRecall(0.5, num_thresholds=20)",
            "keras.metrics.BinaryCrossentropy()",
            "keras.metrics.Hinge()",
            "Largest()",
            "PerExample()",
        ),
    ),
    "onehot": Task(
        "np.eye(3, dtype='float32')[rng.integers(0, 3, {n})]",
        "layers.Dense(3, 'softmax'",
        (
            "categorical",
            "smoothed",
            "categorical_focal",
            "kl",
            "categorical_hinge",
            "dice",
            "tversky",
        ),
        (
            "'accuracy'",
            "keras.metrics.TopKCategoricalAccuracy(2)",
            "keras.metrics.F1Score(average='macro')",
            "keras.metrics.F1Score(average=None)",
            "keras.metrics.FBetaScore(average='weighted', beta=2.0)",
            "keras.metrics.OneHotMeanIoU(3)",
            "keras.metrics.KLDivergence()",
            "keras.metrics.CategoricalCrossentropy()",
            "keras.metrics.AUC(num_thresholds=20, multi_label=True)",
        ),
    ),
    "classes": Task(
        "rng.integers(0, 3, {n}).astype('int32')",
        "layers.Dense(3",
        ("sparse", "sparse_ignored", "circle"),
        ("'accuracy'", "keras.metrics.SparseTopKCategoricalAccuracy(2)"),
    ),
    "labels": Task(
        "rng.integers(0, 3, {n}).astype('int32')",
        "layers.Dense(3, 'softmax'",
        ("sparse_soft", "generalized"),
        ("'accuracy'", "keras.metrics.SparseTopKCategoricalAccuracy(2)"),
    ),
    "flags": Task(
        "rng.integers(0, 2, ({n}, 1)).astype('float32')",
        "layers.Dense(1",
        ("binary_logits",),
        ("keras.metrics.BinaryAccuracy(threshold=0.0)", "keras.metrics.AUC(from_logits=True)"),
    ),
    "transcripts": Task(
        "rng.integers(1, 3, ({n}, 2)).astype('int32')", "layers.Dense(3", ("ctc",), ()
    ),
    "tokens": Task(
        "rng.integers(0, 3, ({n}, {length})).astype('int32')",
        "layers.Dense(3",
        ("sparse", "sparse_ignored"),
        ("'accuracy'", "keras.metrics.SparseTopKCategoricalAccuracy(2)"),
    ),
}

#: Tasks whose predictions are a series for each example.
OF_SERIES = ("tokens", "transcripts")

#: `{r}` is the reduction, where there is one.
LOSSES = {
    "mse": "keras.losses.MeanSquaredError({r})",
    "mae": "keras.losses.MeanAbsoluteError({r})",
    "huber": "keras.losses.Huber({r})",
    "log_cosh": "keras.losses.LogCosh({r})",
    "cosine": "keras.losses.CosineSimilarity({r})",
    "mape": "keras.losses.MeanAbsolutePercentageError({r})",
    "msle": "keras.losses.MeanSquaredLogarithmicError({r})",
    "poisson": "keras.losses.Poisson({r})",
    "binary": "keras.losses.BinaryCrossentropy({r})",
    "binary_focal": "keras.losses.BinaryFocalCrossentropy({r})",
    "hinge": "keras.losses.Hinge({r})",
    "squared_hinge": "keras.losses.SquaredHinge({r})",
    "dice": "keras.losses.Dice({r})",
    "tversky": "keras.losses.Tversky({r})",
    "categorical": "keras.losses.CategoricalCrossentropy({r})",
    "smoothed": "keras.losses.CategoricalCrossentropy(label_smoothing=0.1{, r})",
    "categorical_focal": "keras.losses.CategoricalFocalCrossentropy({r})",
    "kl": "keras.losses.KLDivergence({r})",
    "categorical_hinge": "keras.losses.CategoricalHinge({r})",
    "sparse": "keras.losses.SparseCategoricalCrossentropy(from_logits=True{, r})",
    "sparse_ignored": (
        "keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2{, r})"
    ),
    "sparse_soft": "keras.losses.SparseCategoricalCrossentropy({r})",
    "generalized": "keras.losses.CategoricalGeneralizedCrossEntropy({r})",
    "binary_logits": "keras.losses.BinaryCrossentropy(from_logits=True{, r})",
    "ctc": "keras.losses.CTC({r})",
    "circle": "keras.losses.Circle(gamma=2.0{, r})",
    "function": "'mean_squared_error'",
    "lambda_rows": "lambda t, p: keras.ops.mean(keras.ops.square(t - p), axis=-1)",
    "lambda_mean": "lambda t, p: keras.ops.mean(keras.ops.square(t - p))",
    "lambda_root": "lambda t, p: keras.ops.sqrt(keras.ops.mean(keras.ops.square(t - p)) + 0.1)",
    "lambda_variance": (
        "lambda t, p: keras.ops.mean(keras.ops.square(t - p))"
        " + 0.1 * keras.ops.mean(keras.ops.var(p, axis=0))"
    ),
    "lambda_pairs": (
        "lambda t, p: keras.ops.mean(keras.ops.square(t - p))"
        " + 0.1 * keras.ops.mean(keras.ops.abs(p[:, None] - p[None]))"
    ),
    "lambda_sum": "lambda t, p: 0.01 * keras.ops.sum(keras.ops.square(t - p))",
}

REDUCTIONS = ("", "sum", "mean", "mean_with_sample_weight", "sum_over_batch_size")

#: Options of each optimizer that keep rounding small (see `vocabulary`).
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"learning_rate": 0.05},
    "Adam": {"learning_rate": 0.02, "epsilon": 1e-3},
    "AdamW": {"learning_rate": 0.02, "epsilon": 1e-3, "weight_decay": 0.05},
    "RMSprop": {"learning_rate": 0.01, "epsilon": 1e-3},
    "Adagrad": {"learning_rate": 0.1, "epsilon": 1e-3},
    "Adadelta": {"learning_rate": 1.0, "epsilon": 1e-3},
    "Adamax": {"learning_rate": 0.02, "epsilon": 1e-3},
    "Nadam": {"learning_rate": 0.02, "epsilon": 1e-3},
    "Ftrl": {"learning_rate": 0.1},
    "Lion": {"learning_rate": 0.002},
    "Lamb": {"learning_rate": 0.02, "epsilon": 1e-3},
    "Adafactor": {"learning_rate": 0.02},
    "Muon": {"learning_rate": 0.02, "epsilon": 1e-3},
    "ScheduleFreeAdamW": {"learning_rate": 0.02, "epsilon": 1e-3},
    "MultiOptimizer": {},
}
#: What a `MultiOptimizer` is made from: it takes no options.
BY_NAME = (
    "lambda v: keras.optimizers.Adam(0.02, epsilon=1e-3) "
    "if 'kernel' in v.path else keras.optimizers.SGD(0.05)"
)

#: Options that some programs have, and of which optimizers; no entry means of all.
OPTIONS: dict[str, tuple[str, Any]] = {
    "clipnorm": ("clipnorm", 0.05),
    "global_clipnorm": ("global_clipnorm", 0.1),
    "clipvalue": ("clipvalue", 0.01),
    "ema": ("use_ema", True),
    "ema_often": ("ema_overwrite_frequency", 2),
    "accumulated": ("gradient_accumulation_steps", 2),
    "accumulated_3": ("gradient_accumulation_steps", 3),
    "decay": ("weight_decay", 0.05),
    "loss_scale": ("loss_scale_factor", 8.0),
    "momentum": ("momentum", 0.9),
    "nesterov": ("nesterov", True),
    "amsgrad": ("amsgrad", True),
    "centered": ("centered", True),
    "schedule": ("learning_rate", "keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.7)"),
    "cosine_schedule": ("learning_rate", "keras.optimizers.schedules.CosineDecay(0.05, 6)"),
}
OPTIONS_OF = {
    "momentum": ("SGD", "RMSprop"),
    "nesterov": ("SGD",),
    "amsgrad": ("Adam", "AdamW"),
    "centered": ("RMSprop",),
}
EXCLUSIVE = (
    {"clipnorm", "global_clipnorm", "clipvalue"},
    {"accumulated", "accumulated_3"},
    {"schedule", "cosine_schedule"},
)

CALLBACKS = {
    "logs": "Logs()",
    "rate": "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)",
    "plateau": "keras.callbacks.ReduceLROnPlateau('loss', 0.3, patience=0, min_delta=10.0)",
    "early": "keras.callbacks.EarlyStopping('loss', 10.0, 1, restore_best_weights=True)",
    "nan": "keras.callbacks.TerminateOnNaN()",
    "swap": "keras.callbacks.SwapEMAWeights()",
    "stop": (
        "keras.callbacks.LambdaCallback(on_train_batch_end=lambda i, logs: "
        "setattr(model, 'stop_training', i == 1))"
    ),
}
