"""Stateful RNNs on several replicas: each keeps the states of its own rows.

A replica takes the same rows of each global batch of one size, so the states that it left behind
are those of the rows that go on. State variables have as many rows as a slice, while
`Input(batch_shape=...)` names the rows of the global batch. Unequal slices are refused: rows would
move from one replica to another and meet the states of others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import RNN
from tfdist._tf.distribute import local_results
from tfdist.comm.batch_sharding import Slice
from tfdist.errors import ConfigError
from tfdist.keras.hooks import Hook
from tfdist.types import KerasVariable, Layer, Model, StatefulLayer, Structure, Tensor

__all__ = ["check_divided", "holds_own_rows", "hooks", "is_stateful"]

_ADVICE = (
    "Each replica keeps the states of its own rows, so all batches must have one size that the "
    "number of replicas divides, the one in `Input(batch_shape=...)`: give arrays a whole number "
    "of batches, and make data sets with `batch(n, drop_remainder=True)`."
)


def hooks() -> list[Hook]:
    """The seams at which Keras makes states, and runs from them."""
    return [
        Hook(RNN, "_create_state_variables", _of_own_rows),
        Hook(RNN, "build", _of_one_size),
        Hook(RNN, "call", _of_equal_slices),
    ]


def is_stateful(model: Model) -> bool:
    """Whether a model has an RNN that goes on from the states of the batch before."""
    return any(getattr(layer, "stateful", False) for layer in model._flatten_layers())


def holds_own_rows(weight: KerasVariable) -> bool:
    """Whether a variable is a state of a stateful RNN, of which each replica keeps its rows."""
    return getattr(weight, "_tfdist_holds_own_rows", False)


def check_divided(model: Model, batch: Structure) -> None:
    """Raises if the slices of a batch of values are unequal, on all workers alike.

    Args:
        model: a model.
        batch: per-replica slices of a global batch, or a list of such.
    """
    slices = batch[0] if isinstance(batch, list) else batch
    if not isinstance(slices, Slice) or not is_stateful(model):
        return
    strategy = tf.distribute.get_strategy()
    rows, replicas = int(local_results(strategy, slices.total)[0]), strategy.num_replicas_in_sync
    if rows % replicas:
        raise ConfigError(
            f"A stateful model gets a batch of {rows} rows on {replicas} replicas. {_ADVICE}"
        )


def _of_own_rows(original: Callable[..., None]) -> Callable[..., None]:
    """A replica keeps states for its own rows; `Input(batch_shape=...)` names those of all."""

    @functools.wraps(original)
    def create_state_variables(self: StatefulLayer, batch_size: int) -> None:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        # In a replica's function the layer is built from the replica's own slice. A batch that
        # cannot be divided may still be one that each process predicts by itself.
        if tf.distribute.in_cross_replica_context() and batch_size % replicas == 0:
            batch_size //= replicas
        original(self, batch_size)
        for state in keras.tree.flatten(self.states):
            state._tfdist_holds_own_rows = True

    return create_state_variables


def _of_one_size(original: Callable[..., None]) -> Callable[..., None]:
    """Keras needs a number of rows, which slices of several sizes do not have."""

    @functools.wraps(original)
    def build(self: StatefulLayer, sequences_shape: Any, *args: object, **kwargs: object) -> None:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if self.stateful and replicas > 1 and self.states is None and sequences_shape[0] is None:
            raise ConfigError(_unequal(self, None, None, replicas))
        original(self, sequences_shape, *args, **kwargs)

    return build


def _of_equal_slices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Rows of unequal slices would meet the states of other sequences."""

    @functools.wraps(original)
    def call(self: StatefulLayer, sequences: Tensor, *args: object, **kwargs: object) -> object:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        rows = sequences.shape[0]
        in_replica = tf.distribute.get_replica_context() is not None
        if self.stateful and replicas > 1 and in_replica:
            expected = self._expected_batch_size
            if rows is None or (expected is not None and rows != expected):
                raise ConfigError(_unequal(self, rows, expected, replicas))
        return original(self, sequences, *args, **kwargs)

    return call


def _unequal(layer: Layer, rows: int | None, expected: int | None, replicas: int) -> str:
    found = "batches of several sizes" if rows is None else f"slices of {rows} rows"
    kept = "" if expected is None else f" and keeps states for {expected}"
    return (
        f"{type(layer).__name__}(stateful=True) of name {layer.name!r} gets {found} on "
        f"{replicas} replicas{kept}. {_ADVICE}"
    )
