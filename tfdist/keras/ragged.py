"""Ragged batches made dense: rows are padded up to the longest of the whole batch, not a slice's.

A layer that takes a mean over the padded rows, or adds what it computes of the padding, depends on
how long they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
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
        if step is None or step.is_whole or self.shape.rank is None:
            return original(self, default_value, name, shape)
        asked = _sizes_of(shape, self.shape.rank)[1:]
        fixed = all(isinstance(size, int) for size in asked[: self.ragged_rank])
        if fixed or not _is_of_batch(step, self):
            return original(self, default_value, name, shape)
        longest = step.largest(self.bounding_shape(out_type=tf.int64)[1:], _NAME)
        inner = [_size(size, longest[i]) for i, size in enumerate(asked)]
        dense: Tensor = original(self, default_value, name, tf.stack([_LONGEST, *inner]))
        known = [size if isinstance(size, int) else None for size in asked[: self.ragged_rank]]
        dense.set_shape([None, *known, *self.flat_values.shape[1:]])
        return dense

    return to_tensor


#: Stands in a shape for the length of the longest row.
_LONGEST = np.int64(-1)


def _sizes_of(shape: Any, rank: int) -> list[int | Tensor | None]:
    """The sizes that a program asks for: known, computed, or None for those of the longest rows."""
    if shape is None:
        return [None] * rank
    if isinstance(shape, tf.Tensor):
        shape = tf.unstack(shape, num=rank)
    sizes = shape.as_list() if isinstance(shape, tf.TensorShape) else list(shape)
    known = [size if size is None else tf.get_static_value(size) for size in sizes]
    return [
        size if value is None else int(value) if value >= 0 else None
        for size, value in zip(sizes, known, strict=True)
    ]


def _size(asked: int | Tensor | None, longest: Tensor) -> Tensor:
    if asked is None:
        return longest
    size = tf.cast(asked, tf.int64)
    return tf.where(size < 0, longest, size)


def _is_of_batch(step: Step, ragged: Any) -> bool:
    """Whether the lengths of rows depend on the batch; of values, all that eager tensors may."""
    return tf.executing_eagerly() or any(map(step.depends, ragged.nested_row_splits))
