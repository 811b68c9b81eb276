"""Cross-entropies and accuracies of logits that a process has some columns of, without a gather."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._keras import tensorflow_numpy
from tfdist.comm.replica_collectives import Link
from tfdist.config.mesh import MODEL
from tfdist.keras.example_pairs import ROWS, Examples
from tfdist.keras.hooks import Hook
from tfdist.keras.parts import part_behind
from tfdist.keras.replica_context import current_step
from tfdist.sharding.cross_entropy import cross_entropy, largest, sparse_cross_entropy
from tfdist.sharding.relayout import part_of
from tfdist.types import Strategy, Tensor

__all__ = ["hooks"]


def hooks() -> list[Hook]:
    """TensorFlow's losses, which Keras's call, and what its accuracies call."""
    return [
        Hook(tf.nn, "sparse_softmax_cross_entropy_with_logits", _sparse),
        Hook(tf.nn, "softmax_cross_entropy_with_logits", _dense),
        Hook(tensorflow_numpy, "argmax", _largest),
    ]


def _sparse(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of the logits of other processes it is enough to know a sum, a maximum, and the label's."""

    @functools.wraps(original)
    def with_logits(labels: Tensor, logits: Tensor, name: str | None = None) -> Tensor:
        found = _parted(logits)
        if found is None or tf.convert_to_tensor(labels).shape.rank != len(logits.shape) - 1:
            return original(labels, logits, name)
        link, part = found
        ids = tf.cast(tf.reshape(labels, [-1]), tf.int64)
        classes = logits.shape[-1]
        known = tf.debugging.Assert(
            tf.reduce_all((ids >= 0) & (ids < classes)),
            [f"Received a label value which is outside the valid range of [0, {classes}):", ids],
        )
        with tf.control_dependencies([known] if known is not None else []):
            ids = tf.identity(ids)
        return _by_row(sparse_cross_entropy(link, _rows(part), ids), logits, part)

    return with_logits


def _dense(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for labels that are distributions, of which a process needs its columns."""

    @functools.wraps(original)
    def with_logits(
        labels: Tensor, logits: Tensor, axis: int = -1, name: str | None = None
    ) -> Tensor:
        found = _parted(logits)
        last = axis in (-1, len(getattr(logits, "shape", ())) - 1)
        if found is None or not last:
            return original(labels, logits, axis, name)
        link, part = found
        labels = tf.cast(labels, logits.dtype)
        if labels.shape.rank != len(logits.shape) or labels.shape[-1] != logits.shape[-1]:
            return original(labels, logits, axis, name)
        own = _rows(part_of(link, labels, len(logits.shape) - 1))
        totals = tf.reshape(tf.reduce_sum(labels, -1), [-1])
        losses = cross_entropy(link, _rows(part), own, tf.cast(totals, own.dtype))
        return _by_row(losses, logits, part)

    return with_logits


def _largest(original: Callable[..., Any]) -> Callable[..., Any]:
    """Processes exchange the largest of their columns, and its number."""

    @functools.wraps(original)
    def argmax(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
        found = _parted(x) if axis in (-1, len(getattr(x, "shape", ())) - 1) else None
        if found is None or keepdims:
            return original(x, axis, keepdims)
        link, part = found
        return tf.reshape(largest(link, _rows(part)), tf.shape(part)[:-1])

    return argmax


def _parted(logits: Tensor) -> tuple[Link, Tensor] | None:
    """The members of the model axis, and this one's part of logits that are divided by classes."""
    strategy: Strategy = tf.distribute.get_strategy()
    if getattr(strategy, "parted", None) is None or tf.distribute.in_cross_replica_context():
        return None
    link = strategy.link(MODEL)
    part = part_behind(link, logits)
    if part is None or part.dimension != len(logits.shape) - 1:
        return None
    return link, part.value


def _rows(part: Tensor) -> Tensor:
    """Logits or labels by example, in the precision in which TensorFlow computes the loss."""
    rows = tf.reshape(part, [-1, part.shape[-1]])
    return tf.cast(rows, tf.float32) if part.dtype.size < 4 else rows


def _by_row(losses: Tensor, logits: Tensor, part: Tensor) -> Tensor:
    """Losses in the shape of the examples; the examples do not meet in them."""
    shaped = tf.reshape(tf.cast(losses, logits.dtype), tf.shape(part)[:-1])
    shaped = tf.ensure_shape(shaped, logits.shape[:-1])
    step = current_step()
    if step is not None:
        step.note_held(shaped, Examples(ROWS))
    return shaped
