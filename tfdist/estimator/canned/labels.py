"""Labels as a head needs them: checked, of two dimensions, and numbers instead of names."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.types import SparseTensor, Tensor

__all__ = ["as_columns", "check_vocabulary", "ids_of", "names_of", "within"]

tf1 = tf.compat.v1


def check_vocabulary(vocabulary: Sequence[str] | None, n_classes: int) -> tuple[str, ...] | None:
    """A vocabulary of labels as a tuple, or None.

    Raises:
        ConfigError: if it is not a list, or not as long as there are classes.
    """
    if vocabulary is None:
        return None
    if isinstance(vocabulary, str | dict) or not isinstance(vocabulary, Sequence):
        raise ConfigError(
            f"label_vocabulary={vocabulary!r} is no list. Give the names of all classes in order."
        )
    if len(vocabulary) != n_classes:
        raise ConfigError(
            f"label_vocabulary has {len(vocabulary)} names, which conflicts with "
            f"n_classes={n_classes}. Give one name for each class."
        )
    return tuple(vocabulary)


def as_columns(what: str, values: Tensor | SparseTensor, width: int) -> Tensor:
    """A tensor `(batch, width)`, where `(batch,)` stands for width 1.

    Args:
        what: labels or logits, for messages.
        values: the tensor.
        width: the size of its last dimension.

    Raises:
        ConfigError: if it is None, or known to be of another shape.
    """
    if values is None:
        raise ConfigError(
            f"The head got no {what}. Let input_fn return (features, labels), and model_fn pass "
            "labels and logits on."
        )
    dense: Tensor = tf.convert_to_tensor(values)
    if dense.shape.rank == 1 and width == 1:
        dense = dense[:, tf.newaxis]
    if dense.shape.rank is None:
        return tf.reshape(dense, [-1, width])
    if dense.shape.rank != 2 or dense.shape[-1] not in (None, width):
        raise ConfigError(
            f"The {what} have shape {dense.shape}, not (batch, {width}). Check input_fn, and "
            "n_classes or label_dimension of the estimator."
        )
    return tf.ensure_shape(dense, [None, width])


def within(labels: Tensor, n_classes: int) -> Tensor:
    """Labels, checked when they are computed to be numbers from 0 to `n_classes` - 1."""
    limit = tf.cast(n_classes - 1, labels.dtype)
    message = f"Labels must be numbers from 0 to {n_classes - 1}."
    checks = [
        tf1.assert_less_equal(labels, limit, message=message),
        tf1.assert_non_negative(labels, message=message),
    ]
    with tf.control_dependencies(checks):
        return tf.identity(labels)


def ids_of(names: Tensor, vocabulary: tuple[str, ...]) -> Tensor:
    """The numbers of names.

    Args:
        names: a string tensor.
        vocabulary: the names in order.

    Returns:
        An int64 tensor of the same shape. A name that is not in the vocabulary is an error when it
        comes.

    Raises:
        ConfigError: if the labels are not strings.
    """
    if names.dtype != tf.string:
        raise ConfigError(
            f"The labels are of {names.dtype}, which conflicts with label_vocabulary. Give strings "
            "as labels, or leave label_vocabulary out."
        )
    numbers = tf.range(len(vocabulary), dtype=tf.int64)
    initializer = tf1.lookup.KeyValueTensorInitializer(tf.constant(vocabulary), numbers)
    ids = tf1.lookup.StaticHashTable(initializer, -1).lookup(names)
    message = f"A label is not in label_vocabulary ({', '.join(map(str, vocabulary))}):"
    known = tf1.assert_non_negative(ids, data=[message, names])
    with tf.control_dependencies([known]):
        return tf.identity(ids)


def names_of(ids: Tensor, vocabulary: tuple[str, ...] | None) -> Tensor:
    """The names of classes; without a vocabulary their numbers as strings."""
    if vocabulary is None:
        return tf.strings.as_string(ids)
    return tf.gather(tf.constant(vocabulary), ids)
