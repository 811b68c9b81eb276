"""Prediction: the model's outputs for some input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator import modeling, sessions
from tfdist.estimator.spec import ModeKeys
from tfdist.estimator.types import Estimator
from tfdist.types import Array, Structure

__all__ = ["predict"]

tf1 = tf.compat.v1


def predict(
    estimator: Estimator,
    input_fn: Callable[..., Any],
    *,
    keys: Sequence[str] | str | None,
    hooks: Sequence[Any],
    checkpoint: str | None,
    singly: bool,
) -> Iterator[Any]:
    """Yields predictions, one example or one batch at a time.

    Args:
        estimator: the Estimator.
        input_fn: the input; labels are ignored.
        keys: which predictions; None means all.
        hooks: the caller's hooks.
        checkpoint: the checkpoint's prefix; None predicts with initial values.
        singly: whether examples are yielded rather than batches.

    Raises:
        ConfigError: for unknown keys, or predictions of unequal lengths.
    """
    with modeling.graph_for(estimator.config):
        tf1.train.get_or_create_global_step()
        spec = modeling.spec_on_input(estimator, input_fn, ModeKeys.PREDICT, without_labels=True)
        wanted = _chosen(spec.predictions, keys)
        every = [*hooks, *spec.prediction_hooks]
        made = sessions.of_checkpoint(spec.scaffold, checkpoint, estimator.config, every)
    # Outside of the graph's context, which would be the caller's between two predictions.
    with made as session:
        while not session.should_stop():
            batch = session.run(wanted)
            if singly:
                yield from _examples(batch)
            else:
                yield batch


def _chosen(predictions: Structure, keys: Sequence[str] | str | None) -> Structure:
    if not keys:
        return predictions
    if not isinstance(predictions, Mapping):
        raise ConfigError(
            f"predict_keys={keys!r} conflicts with predictions that are a single tensor. Leave "
            "predict_keys out."
        )
    names = [keys] if isinstance(keys, str) else list(keys)
    chosen = {name: value for name, value in predictions.items() if name in names}
    if not chosen:
        raise ConfigError(
            f"predict_keys={keys!r} names none of the predictions: {', '.join(predictions)}."
        )
    return chosen


def _examples(batch: Array | Mapping[str, Array]) -> Iterator[Any]:
    if not isinstance(batch, Mapping):
        yield from batch
        return
    lengths = {
        name: len(value) if getattr(value, "ndim", 0) else -1 for name, value in batch.items()
    }
    if len(set(lengths.values())) > 1 or -1 in lengths.values():
        raise ConfigError(
            f"The predictions have different batch sizes: {lengths}. Give yield_single_examples="
            "False to get batches as they are."
        )
    for index in range(next(iter(lengths.values()))):
        yield {name: value[index] for name, value in batch.items()}
