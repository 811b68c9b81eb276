"""A global batch as microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigError

__all__ = ["examples_of", "sizes_of", "split_rows"]


def examples_of(data: Any) -> int:
    """The number of examples of a batch.

    Args:
        data: a nest of tensors of shape `(batch, ...)`.

    Raises:
        ConfigError: if a tensor is ragged or sparse.
    """
    for leaf in keras.tree.flatten(data):
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
            raise ConfigError(
                f"strategy='pipeline' cannot split a {type(leaf).__name__} into microbatches. Make "
                "it dense in the data set: `tensor.to_tensor()` or `tf.sparse.to_dense(tensor)`."
            )
        if leaf is not None:
            return int(leaf.shape[0])
    raise ConfigError("The batch is empty: strategy='pipeline' found no tensor in it.")


def sizes_of(examples: int, microbatches: int, *, first: bool) -> list[int]:
    """The sizes of the microbatches: alike, or in a last batch different by one at most.

    Args:
        examples: of the batch.
        microbatches: how many.
        first: whether this is the first batch, which must be divisible: its size is the program's,
            and not what is left at the end of the data.

    Raises:
        ConfigError: if the first batch cannot be divided.
    """
    if first and examples % microbatches:
        below = examples // microbatches * microbatches
        near = " or ".join(str(each) for each in (below, below + microbatches) if each)
        raise ConfigError(
            f"microbatches={microbatches} does not divide the batch of {examples} examples. Choose "
            f"a batch of {near} examples, or a number of microbatches that divides {examples}."
        )
    count = min(examples, microbatches)
    least, more = divmod(examples, count)
    return [least + (number < more) for number in range(count)]


def split_rows(data: Any, sizes: Sequence[int]) -> list[Any]:
    """Parts of a nest of tensors, one after the other.

    Args:
        data: a nest of tensors of shape `(batch, ...)` and Nones.
        sizes: the parts' numbers of examples.
    """
    flat = keras.tree.flatten(data)
    parts = [
        [None] * len(sizes) if leaf is None else tf.split(leaf, list(sizes), 0) for leaf in flat
    ]
    return [
        keras.tree.pack_sequence_as(data, [each[number] for each in parts])
        for number in range(len(sizes))
    ]
