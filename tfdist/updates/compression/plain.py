"""Sums of tensors that are not compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from tfdist.updates.link import Link

__all__ = ["sum_plainly"]


def sum_plainly(link: Link, values: Sequence[Any]) -> list[Any]:
    """The sums of tensors, by one call; those of 16 bits travel as float32, which links can add."""
    if not values:
        return []
    halves = (tf.float16, tf.bfloat16)
    sent = [tf.cast(each, tf.float32) if each.dtype in halves else each for each in values]
    return [
        tf.cast(total, value.dtype) for total, value in zip(link.sum(sent), values, strict=True)
    ]
