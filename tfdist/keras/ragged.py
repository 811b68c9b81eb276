"""Ragged batches made dense: rows are padded up to the longest of the whole batch, not a slice's.

A layer that takes a mean over the padded rows, or adds what it computes of the padding, depends on
how long they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras.hooks import Hook
from tfdist.keras.replica_context import Step, current_step, settling
from tfdist.types import Scalar, Tensor

__all__ = ["hooks"]

_NAME = "tf.RaggedTensor.to_tensor"


def hooks() -> list[Hook]:
    """The seam at which a ragged tensor is padded."""
    return [Hook(tf.RaggedTensor, "to_tensor", _as_long_as_the_batch)]


def _as_long_as_the_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """TensorFlow pads up to the longest row that a replica has."""

    @functools.wraps(original)
    def to_tensor(
        self: Any, default_value: Scalar | None = None, name: str | None = None, shape: Any = None
    ) -> Tensor:
        step = current_step() or settling.value
        if self.shape.rank is None:
            return original(self, default_value, name, shape)
        asked = [None] * self.shape.rank if shape is None else tf.TensorShape(shape).as_list()
        padded = None in asked[1 : self.ragged_rank + 1]
        if step is None or step.is_whole or not padded or not _is_of_batch(step, self):
            return original(self, default_value, name, shape)
        longest = step.largest(self.bounding_shape(out_type=tf.int64)[1:], _NAME)
        inner = [longest[i] if size is None else size for i, size in enumerate(asked[1:])]
        shape = tf.stack([tf.constant(-1, tf.int64), *(tf.cast(size, tf.int64) for size in inner)])
        dense: Tensor = original(self, default_value, name, shape)
        dense.set_shape([None, *asked[1 : self.ragged_rank + 1], *self.flat_values.shape[1:]])
        return dense

    return to_tensor


def _is_of_batch(step: Step, ragged: Any) -> bool:
    """Whether the lengths of rows depend on the batch; of values, all that eager tensors may."""
    return tf.executing_eagerly() or any(map(step.depends, ragged.nested_row_splits))
