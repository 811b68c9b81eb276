"""Cross-entropy of logits of which each member of an axis has some classes (arXiv:1909.08053).

For each example the members exchange the largest of their logits, the sum of their exponentials and
the logit of the label, whatever the number of classes is. The gradient of a member's logits needs
no exchange.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist._tf.distribute import independently
from tfdist.comm.replica_collectives import Link
from tfdist.types import Tensor

__all__ = ["cross_entropy", "largest", "sparse_cross_entropy"]

_ONCE = (
    "The cross-entropy of logits in parts along the model axis has a first derivative only. Divide "
    "the layer of the logits in no way (--layouts), or take the second derivative in one process."
)


def sparse_cross_entropy(link: Link, logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of labels and the softmax over all members' logits, of each example.

    Args:
        link: the members of the axis.
        logits: this member's part, of shape `(examples, classes)`, float32 or float64.
        labels: the numbers of classes of all members, of shape `(examples,)`, whole.
    """
    size = logits.shape[1]
    local_labels = tf.cast(labels, tf.int64) - tf.cast(link.index * size, tf.int64)
    here = (local_labels >= 0) & (local_labels < size)
    local_labels = tf.where(here, local_labels, 0)

    def forward(value: Tensor) -> tuple[Tensor, Any]:
        own = tf.where(here, tf.gather(value, local_labels, batch_dims=1), 0)
        logarithm, picked = _over_members(link, value, own)

        def backward(upstream: Tensor) -> Tensor:
            softmax = tf.exp(value - logarithm[:, None])
            rows = tf.range(tf.size(local_labels, tf.int64))
            at = tf.stack([rows, local_labels], 1)
            slopes = tf.tensor_scatter_nd_sub(softmax, at, tf.cast(here, softmax.dtype))
            return _differentiable_once(slopes * upstream[:, None])

        return logarithm - picked, backward

    loss: Tensor = tf.custom_gradient(forward)(logits)
    return loss


def cross_entropy(link: Link, logits: Tensor, labels: Tensor, totals: Tensor) -> Tensor:
    """The cross-entropy of distributions and the softmax over all members' logits.

    Args:
        link: the members of the axis.
        logits: this member's part, of shape `(examples, classes)`, float32 or float64.
        labels: its part of the probabilities of classes, of the same shape and type.
        totals: the sum over all members of each example's labels, of shape `(examples,)`; labels
            need not be probabilities. TensorFlow's gradient of the logits takes it for 1.
    """

    def forward(value: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        logarithm, picked = _over_members(link, value, tf.reduce_sum(value * target, 1))

        def backward(upstream: Tensor) -> tuple[Tensor, Tensor]:
            scale, relative = upstream[:, None], value - logarithm[:, None]
            slopes = (tf.exp(relative) - target) * scale
            return _differentiable_once(slopes), _differentiable_once(-relative * scale)

        return logarithm * totals - picked, backward

    loss: Tensor = tf.custom_gradient(forward)(logits, labels)
    return loss


def largest(link: Link, logits: Tensor) -> Tensor:
    """The number of the largest of all members' logits of each example, int32; the first of equals.

    Args:
        link: the members of the axis.
        logits: this member's part, of shape `(examples, classes)`.
    """
    classes = tf.argmax(logits, 1, tf.int32)
    values = _gathered(link, tf.gather(logits, classes, batch_dims=1))
    numbers = _gathered(link, classes + link.index * logits.shape[1])
    predicted: Tensor = tf.gather(tf.transpose(numbers), tf.argmax(values, 0), batch_dims=1)
    return predicted


def _gathered(link: Link, own: Tensor) -> Tensor:
    """The members' tensors of a shape, one after the other along a new first dimension."""
    with independently():
        flat = link.gather(tf.reshape(own, [-1]))
    every: Tensor = tf.reshape(flat, tf.concat([[link.count], tf.shape(own)], 0))
    return every


def _over_members(link: Link, logits: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum of all exponentials, and the sum of a number of each member.

    Args:
        link: the members.
        logits: this member's part, `(examples, classes)`.
        picked: this member's number of each example.
    """
    largest = tf.reduce_max(logits, 1)
    # The difference of two infinities would be NaN, where the exponentials are zero.
    shift = tf.where(tf.math.is_inf(largest) & (largest < 0), tf.zeros_like(largest), largest)
    exponentials = tf.reduce_sum(tf.exp(logits - shift[:, None]), 1)
    own = tf.stack([largest, exponentials, picked])
    largests, sums, numbers = tf.unstack(_gathered(link, own), 3, axis=1)
    top = tf.reduce_max(largests, 0)
    total = tf.reduce_sum(sums * tf.exp(largests - top), 0)
    return top + tf.math.log(total), tf.reduce_sum(numbers, 0)


def _differentiable_once(gradient: Tensor) -> Tensor:
    once: Tensor = tf.raw_ops.PreventGradient(input=gradient, message=_ONCE)
    return once
