"""From labels, logits and weights to one loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.calling import call_with, parameters_of
from tfdist.types import FeatureColumn, Features, Scalar, Tensor
from tfdist.utils.validation import check_choice

__all__ = ["check_loss_fn", "custom_loss", "example_weights", "reduced", "reduction_of"]

tf1 = tf.compat.v1
_V1 = tf1.losses.Reduction

#: Values of `loss_reduction`: the names of TensorFlow 2, and those of TensorFlow 1.
_REDUCTIONS = {
    "sum_over_batch_size": _V1.SUM_OVER_BATCH_SIZE,
    "auto": _V1.SUM_OVER_BATCH_SIZE,
    "sum": _V1.SUM,
    **{name: name for name in _V1.all() if name != _V1.NONE},
}

_LOSS_FN_ARGUMENTS = ("labels", "logits", "features", "loss_reduction")


def reduction_of(name: str) -> str:
    """TensorFlow 1's name of a reduction.

    Raises:
        ConfigError: for an unknown one, and for `none`: a model is trained by one number.
    """
    check_choice("loss_reduction", name, _REDUCTIONS)
    return str(_REDUCTIONS[name])


def reduced(losses: Tensor, weights: Tensor | float, reduction: str) -> Tensor:
    """One number from the losses of examples.

    Args:
        losses: `(batch, n)`.
        weights: the factors of losses, `(batch, 1)` or 1.
        reduction: one of TensorFlow 1's names. `tf.distribute` learns from it whether losses of
            replicas are added or averaged.
    """
    return tf1.losses.compute_weighted_loss(
        losses, weights, loss_collection=None, reduction=reduction
    )


def example_weights(features: Features | None, column: str | FeatureColumn | None) -> Scalar:
    """The weights of examples.

    Args:
        features: tensors by name.
        column: a feature's name, a numeric column, or None.

    Returns:
        A float tensor `(batch, 1)`, or 1.0 without a column.

    Raises:
        ConfigError: if there is no such feature.
    """
    if column is None:
        return 1.0
    key = column if isinstance(column, str) else column.key
    if not isinstance(features, Mapping) or key not in features:
        raise ConfigError(
            f"weight_column={key!r} is no feature. There are "
            f"{sorted(features) if isinstance(features, Mapping) else features!r}. Let input_fn "
            "return the weights with the features."
        )
    weights = tf.convert_to_tensor(features[key])
    normalize = getattr(column, "normalizer_fn", None)
    if normalize is not None:
        weights = normalize(weights)
    return tf.reshape(tf.cast(weights, tf.float32), [-1, 1])


def check_loss_fn(loss_fn: Callable[..., Any] | None) -> None:
    """Refuses a loss function that cannot be called.

    Raises:
        ConfigError: if it does not take labels and logits, or something unknown.
    """
    if loss_fn is None:
        return
    names: Sequence[str] = parameters_of(loss_fn)
    missing = [name for name in ("labels", "logits") if name not in names]
    unknown = [name for name in names if name not in _LOSS_FN_ARGUMENTS]
    if missing or unknown:
        wrong = f"does not take {missing[0]!r}" if missing else f"takes {unknown[0]!r}"
        raise ConfigError(
            f"loss_fn{tuple(names)} {wrong}. It must take labels and logits, and may take "
            "features and loss_reduction."
        )


def custom_loss(
    loss_fn: Callable[..., Any],
    labels: Tensor,
    logits: Tensor,
    features: Features | None,
    reduction: str,
) -> Tensor:
    """The losses of examples by a user's function.

    Returns:
        A tensor `(batch, 1)`.

    Raises:
        ConfigError: if the function returns another shape.
    """
    offered = {
        "labels": labels,
        "logits": logits,
        "features": features,
        "loss_reduction": reduction,
    }
    losses = tf.convert_to_tensor(call_with("loss_fn", loss_fn, offered))
    if losses.shape.rank not in (None, 2) or losses.shape[-1:] not in ([1], [None]):
        raise ConfigError(
            f"loss_fn returned a tensor of shape {losses.shape}. It must return one loss for each "
            "example, (batch, 1), not reduced."
        )
    return losses
