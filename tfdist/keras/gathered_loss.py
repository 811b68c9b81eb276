"""Losses in which the examples of a batch meet, computed on the examples of all replicas.

Contrastive losses with negatives in the batch, ranking losses, and those that relate an example to
a statistic of the batch, have other values on a part of the batch. A `keras.losses.Loss`, or the
function that `compile` makes one of, can be called again: on the labels and predictions of the
whole batch, which are gathered. Each replica then goes on with the rows of its own examples. A loss
that a `train_step` computes by itself cannot be called again: that is named (`whole_batch.py`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import loss_module
from tfdist.comm.batch_dependence import is_symbolic
from tfdist.errors import ConfigError
from tfdist.keras.example_pairs import ROWS, Examples, meeting_of
from tfdist.keras.hooks import Hook, on_whole_batch
from tfdist.keras.reductions import is_by_feature, reduction_of
from tfdist.keras.replica_context import Call, Step, current_step, entered
from tfdist.keras.whole_batch import check_given, check_places
from tfdist.types import Structure, Tensor

__all__ = ["hooks", "noted_call", "of_whole_batch"]


def hooks() -> list[Hook]:
    """The seam of Keras's losses."""
    return [Hook(loss_module.Loss, "__call__", _noted)]


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes which loss is being computed, and of what."""

    @functools.wraps(original)
    def call(
        self: Any, y_true: Structure, y_pred: Structure, sample_weight: Structure = None
    ) -> Tensor:
        step = current_step()
        if step is None:
            return original(self, y_true, y_pred, sample_weight)
        if not step.calls:  # A loss may give another one its own values.
            check_given(step, (y_true, y_pred, sample_weight))
        with noted_call(step, self.call, self.dtype, (y_true, y_pred)):
            return original(self, y_true, y_pred, sample_weight)

    return call


@contextlib.contextmanager
def noted_call(
    step: Step,
    compute: Callable[[Any, Any], Any],
    dtype: str | None,
    arguments: tuple[Structure, Structure],
) -> Iterator[None]:
    """Notes the call of a function of labels and predictions while it is made."""
    step.calls.append(Call(compute, dtype, arguments))
    try:
        yield
    finally:
        step.calls.pop()


def of_whole_batch(step: Step, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The values of a loss or a metric for the replica's examples, beside those of all others.

    Args:
        step: the calling replica's step, in which a loss or a metric is being computed.
        values: those of the replica's own examples alone: one value for each, one for each
            feature, or a number.
        mask: which of the values count; a loss may decide that, as `Circle` does.

    Returns:
        Both, as they are if the other replicas' examples make no difference.
    """
    if step.is_whole or not step.calls or not is_symbolic(values):
        return values, mask
    compute, dtype, arguments = step.calls[-1]
    examples = tf.nest.flatten(arguments)
    if not all(isinstance(each, tf.Tensor) and each.shape.rank for each in examples):
        return values, mask
    given = itertools.chain(examples, *map(_logits_behind, examples))
    known = {id(each): Examples(ROWS) for each in given} | step.known
    found = meeting_of(values, step.depends, known, statistics=True)
    where = None if found is None else found.where
    if where is None and values.shape.rank == 0:
        where = next(iter(reduction_of(values, step.depends, step.means).unknown), None)
    if where is None:
        return values, mask
    check_places(step, examples)
    gathered, start = step.gather(examples, where)
    with entered(None), on_whole_batch.up():
        y_true, y_pred = _converted(dtype, tf.nest.pack_sequence_as(arguments, gathered))
        whole = compute(y_true, y_pred)
    if values.shape.rank == 0 or is_by_feature(values, step.depends, step.averages()):
        return step.note_mean(whole), mask
    if found is not None and found.chooses:
        raise ConfigError(
            f"A loss chooses examples by their places in the batch (at {where}) and returns a "
            f"number for each of them, which conflicts with {step.replicas} replicas, whose "
            "examples have other places. Return the mean of the numbers."
        )
    own = start + tf.range(tf.shape(examples[0])[0])
    rows = tf.minimum(own, tf.shape(whole)[0] - 1)
    masks = [getattr(arguments[1], "_keras_mask", None)]
    if hasattr(whole, "_keras_mask"):
        masks.append(tf.gather(whole._keras_mask, rows))
    known_masks = [each for each in masks if each is not None]
    mask = functools.reduce(tf.logical_and, known_masks) if known_masks else None
    return tf.gather(whole, rows), mask


def _logits_behind(probabilities: Tensor) -> list[Tensor]:
    """The logits of probabilities, of which Keras computes a cross-entropy in their place."""
    if not is_symbolic(probabilities):
        return []
    noted = getattr(probabilities, "_keras_logits", None)
    softened = probabilities.op.type in ("Softmax", "Sigmoid")
    found = [noted, probabilities.op.inputs[0] if softened else None]
    return [each for each in found if each is not None]


def _converted(dtype: str | None, values: Structure) -> Any:
    """As `keras.losses.Loss.__call__` does."""
    return tf.nest.map_structure(
        lambda each: keras.ops.convert_to_tensor(each, dtype=dtype), values
    )
