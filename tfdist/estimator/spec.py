"""The value that a `model_fn` returns, and the modes in which it is called."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.types import Operation, Scaffold, Structure, Tensor

__all__ = ["EstimatorSpec", "ModeKeys", "checked_hooks"]

tf1 = tf.compat.v1


class ModeKeys:
    """The modes in which a `model_fn` is called."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


#: The fields that each mode requires.
_NEEDED = {
    ModeKeys.TRAIN: ("loss", "train_op"),
    ModeKeys.EVAL: ("loss",),
    ModeKeys.PREDICT: ("predictions",),
}

_Fields = collections.namedtuple(
    "_Fields",
    "mode predictions loss train_op eval_metric_ops export_outputs training_chief_hooks "
    "training_hooks scaffold evaluation_hooks prediction_hooks",
)


class EstimatorSpec(_Fields):
    """The ops and objects that a `model_fn` has made.

    Args:
        mode: one of `ModeKeys`.
        predictions: a tensor, or a dictionary of tensors. Needed to predict.
        loss: a scalar tensor. Needed to train and to evaluate.
        train_op: the op of one training step, which adds one to the global step.
        eval_metric_ops: for each metric `(value, update_op)`, as `tf.compat.v1.metrics` makes them.
        export_outputs: for each signature an output of `tfdist.estimator.export`; by default the
            predictions are the only signature.
        training_chief_hooks: hooks of training on the chief alone.
        training_hooks: hooks of training on every worker.
        scaffold: `tf.compat.v1.train.Scaffold`.
        evaluation_hooks: hooks of evaluation.
        prediction_hooks: hooks of prediction.

    Raises:
        ConfigError: if something is missing for the mode, or of the wrong kind.
    """

    __slots__ = ()

    def __new__(
        cls,
        mode: str,
        predictions: Structure = None,
        loss: Tensor | None = None,
        train_op: Operation | Tensor | None = None,
        eval_metric_ops: Mapping[str, Any] | None = None,
        export_outputs: Mapping[str, Any] | None = None,
        training_chief_hooks: Iterable[Any] | None = None,
        training_hooks: Iterable[Any] | None = None,
        scaffold: Scaffold | None = None,
        evaluation_hooks: Iterable[Any] | None = None,
        prediction_hooks: Iterable[Any] | None = None,
    ) -> EstimatorSpec:
        """See the class."""
        _check_mode(mode, {"predictions": predictions, "loss": loss, "train_op": train_op})
        if scaffold is not None and not isinstance(scaffold, tf1.train.Scaffold):
            raise ConfigError(
                f"EstimatorSpec(scaffold={scaffold!r}) is no tf.compat.v1.train.Scaffold."
            )
        return super().__new__(
            cls,
            mode,
            _checked_predictions(predictions, mode),
            _scalar(loss),
            _checked_train_op(train_op),
            _checked_metrics(eval_metric_ops or {}),
            _checked_outputs(export_outputs),
            checked_hooks("EstimatorSpec(training_chief_hooks=…)", training_chief_hooks),
            checked_hooks("EstimatorSpec(training_hooks=…)", training_hooks),
            scaffold,
            checked_hooks("EstimatorSpec(evaluation_hooks=…)", evaluation_hooks),
            checked_hooks("EstimatorSpec(prediction_hooks=…)", prediction_hooks),
        )


def checked_hooks(what: str, hooks: Iterable[Any] | None) -> tuple[Any, ...]:
    """The hooks that an argument gave as a tuple."""
    checked = tuple(hooks or ())
    for hook in checked:
        if not isinstance(hook, tf1.train.SessionRunHook):
            raise ConfigError(
                f"{what} holds {hook!r}, which is not a tf.compat.v1.train.SessionRunHook."
            )
    return checked


def _check_mode(mode: str, fields: Mapping[str, Any]) -> None:
    if mode not in _NEEDED:
        raise ConfigError(
            f"EstimatorSpec(mode={mode!r}) has no known mode. Pass on the `mode` that model_fn "
            "was called with, one of tfdist.estimator.ModeKeys."
        )
    missing = [name for name in _NEEDED[mode] if fields[name] is None]
    if missing:
        raise ConfigError(
            f"EstimatorSpec(mode={mode!r}) has no {' and no '.join(missing)}, which that mode "
            "needs. Return it from model_fn."
        )


def _checked_predictions(predictions: Structure, mode: str) -> Structure:
    if predictions is None:
        return {}
    values = predictions.values() if isinstance(predictions, Mapping) else [predictions]
    wrong = [value for value in values if not tf.is_tensor(value)]
    if wrong and mode == ModeKeys.PREDICT:
        raise ConfigError(
            f"EstimatorSpec(predictions=…) holds {wrong[0]!r}, which is not a tensor. Give a "
            "tensor or a dictionary of tensors."
        )
    return predictions


def _scalar(loss: Tensor | None) -> Tensor | None:
    if loss is None:
        return None
    loss = tf.convert_to_tensor(loss)
    if loss.shape.rank is not None and loss.shape.num_elements() != 1:
        raise ConfigError(
            f"EstimatorSpec(loss=…) has shape {loss.shape}, but a loss is one number. Reduce it, "
            "such as by tf.reduce_mean."
        )
    return loss if loss.shape.rank == 0 else tf.reshape(loss, [])


def _checked_train_op(train_op: Any) -> Operation | Tensor | None:
    if train_op is None or isinstance(train_op, tf.Operation) or tf.is_tensor(train_op):
        return train_op
    if hasattr(train_op, "op"):  # A variable that is assigned to.
        return train_op.op
    raise ConfigError(
        f"EstimatorSpec(train_op={train_op!r}) is neither an operation nor a tensor. Give what "
        "`optimizer.minimize(loss, global_step)` of a tf.compat.v1.train optimizer returns."
    )


def _checked_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    for name, metric in metrics.items():
        if not (isinstance(metric, tuple | list) and len(metric) == 2):
            raise ConfigError(
                f"EstimatorSpec(eval_metric_ops={{{name!r}: {metric!r}}}) is no pair of a value "
                "and an update op. Make it with tf.compat.v1.metrics; metrics of Keras do not "
                "work here."
            )
    return dict(metrics)


def _checked_outputs(outputs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    for name, output in (outputs or {}).items():
        if not callable(getattr(output, "as_signature_def", None)):
            raise ConfigError(
                f"EstimatorSpec(export_outputs={{{name!r}: {output!r}}}) is no output. Make it a "
                "PredictOutput, ClassificationOutput or RegressionOutput of "
                "tfdist.estimator.export."
            )
    return None if outputs is None else dict(outputs)
