"""The losses that layers add, apart for each replica.

A layer keeps the losses of its last call in a list. Replicas of one process are traced on threads
of their own, which take turns where one has to wait for the others, as when a loss gathers all
examples: the next replica calls the model before the first has computed its loss, and all would
have the losses of the last one. Keras keeps other such state by thread, and here this too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import global_state, in_stateless_scope
from tfdist.keras.hooks import Hook
from tfdist.types import Structure

#: The key of Keras's state of a thread: losses by the `id` of their layer, each with the layer.
_KEY = "tfdist_added_losses"


def hooks() -> list[Hook]:
    """The seams of Keras's layers that add losses, list them and forget them."""
    return [
        Hook(keras.layers.Layer, "add_loss", _added_for_replica),
        Hook(keras.layers.Layer, "_get_own_losses", _of_replica),
        Hook(keras.layers.Layer, "_clear_losses", _cleared_for_replica),
    ]


def _losses_of(layer: Any) -> list[Any] | None:
    """The losses of a layer on the calling replica; None if the layer keeps them itself."""
    if in_stateless_scope() or tf.distribute.get_replica_context() is None:
        return None
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1 or len(strategy.extended.worker_devices) == 1:
        return None
    state = vars(global_state.GLOBAL_STATE_TRACKER)
    kept: list[Any] = state.setdefault(_KEY, {}).setdefault(id(layer), (layer, []))[1]
    return kept


def _added_for_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """Moves the losses that the layer has taken to those of the replica."""

    @functools.wraps(original)
    def add_loss(self: Any, loss: Structure) -> None:
        original(self, loss)
        own = _losses_of(self)
        if own is not None:
            own += self._losses
            self._losses.clear()

    return add_loss


def _of_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lists the losses that the layer has added on this replica."""

    @functools.wraps(original)
    def get_own_losses(self: Any) -> list[Any]:
        own = _losses_of(self)
        return original(self) if own is None else list(own)

    return get_own_losses


def _cleared_for_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """Forgets this replica's losses; Keras goes on with the layers of the layer."""

    @functools.wraps(original)
    def clear_losses(self: Any) -> None:
        own = _losses_of(self)
        if own is not None:
            own.clear()
        original(self)

    return clear_losses
