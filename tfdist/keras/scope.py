"""Entering and leaving a strategy's scope, as far as Keras is concerned."""

from __future__ import annotations

from tfdist.keras import (
    batch_logs,
    batches,
    binding,
    building,
    callbacks,
    distribution,
    elastic,
    executions,
    feeding,
    functions,
    gradient_functions,
    input_comparison,
    iterators,
    layouts,
    learning_rate,
    loops,
    losses,
    normalization,
    optimizers,
    parted_losses,
    plain_variables,
    predictions,
    ragged,
    replica_attributes,
    reporting,
    saving,
    seeds,
    sharded_files,
    sharded_weights,
    stateful,
    tensor_parallel,
    updating,
    weights,
    zero,
)
from tfdist.keras.hooks import Hook, HookSet


def all_hooks() -> list[Hook]:
    """Every seam of Keras that is hooked inside a scope."""
    rooms = (
        batch_logs,
        batches,
        binding,
        building,
        callbacks,
        distribution,
        elastic,
        executions,
        feeding,
        functions,
        gradient_functions,
        input_comparison,
        iterators,
        layouts,
        learning_rate,
        loops,
        losses,
        normalization,
        optimizers,
        parted_losses,
        plain_variables,
        predictions,
        ragged,
        replica_attributes,
        reporting,
        saving,
        seeds,
        sharded_files,
        sharded_weights,
        stateful,
        tensor_parallel,
        updating,
        weights,
        zero,
    )
    return [hook for room in rooms for hook in room.hooks()]


_hooks = HookSet(all_hooks)


def enter() -> None:
    """Hooks Keras, unless an outer scope has."""
    _hooks.enter()


def leave() -> None:
    """Restores Keras when the outermost scope closes."""
    _hooks.leave()
