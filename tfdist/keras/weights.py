"""Weights that a Keras step assigns without an optimizer: moving statistics, codebooks, metrics.

Keras gives such weights no aggregation, so each replica keeps its own values and the replicas drift
apart: a BatchNormalization evaluated on worker 1 differs from worker 0. tfdist averages what a step
assigned at its end, weighted by examples, in one exchange.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import types
from tfdist._keras import KerasVariable, SeedGenerator, Variable
from tfdist._tf.distribute import is_distributed
from tfdist._tf.variables import CHANGES
from tfdist.comm.batch_dependence import Dependence, is_symbolic
from tfdist.comm.replica_collectives import sum_over_replicas
from tfdist.errors import EquivalenceWarning
from tfdist.keras.assignments import (
    at_once,
    check_constants,
    is_of_keras,
    is_of_own_layer,
    on_whole_batch,
)
from tfdist.keras.custom_gradients import check_moved
from tfdist.keras.hooks import Hook, accounted, exchanged
from tfdist.keras.metric_updates import of_replica
from tfdist.keras.reductions import reduction_of
from tfdist.keras.replica_context import Step, current_step, exchanged_in_loop, settling
from tfdist.keras.stateful import holds_own_rows
from tfdist.keras.updating import leaves_to_updates
from tfdist.sharding.exchange import own_shard
from tfdist.sharding.variables import ShardedVariable
from tfdist.types import Tensor
from tfdist.utils.messages import warn

__all__ = [
    "assignable",
    "average_assigned",
    "hooks",
    "note_assigned",
    "warn_of_own_start",
    "warn_of_own_value",
]


def hooks() -> list[Hook]:
    """The seams of Keras's variables and seed generators."""
    return [
        Hook(Variable, "_direct_assign", _notice_assignment),
        Hook(KerasVariable, "value", _as_assigned),
        Hook(SeedGenerator, "next", _own_seed_per_replica),
        Hook(KerasVariable, "__float__", _read_first(float)),
        Hook(KerasVariable, "__int__", _read_first(int)),
        Hook(KerasVariable, "__array__", _read_first(np.asarray)),
        Hook(KerasVariable, "__repr__", _with_value),
    ]


def average_assigned(step: Step) -> None:
    """Gives the layer weights that were assigned in `step` one value on all replicas.

    Statistics are averaged, weighted by examples. Values computed from sums over the examples,
    such as a counter of them, is computed again from the sums over the whole batch. Replicas that
    train by themselves for some steps average them with their weights.

    Raises:
        ConfigError: if a weight holds examples of the batch, of which each replica has others.
    """
    if leaves_to_updates(step.model):
        return
    step = step.beside_gathered()
    averaged = []
    for weight, value in step.assigned.values():
        if holds_own_rows(weight):
            continue
        if isinstance(weight, ShardedVariable):
            _correct_part(step, weight, value)
            continue
        subject, of_keras = f"The weight {weight.path!r}", is_of_keras(step, weight)
        if step.is_static and is_of_own_layer(step, weight):
            check_constants(step, value, subject)
        whole = on_whole_batch(step, value, subject, of_keras=of_keras)
        if whole is not None:
            _assign(weight, tf.cast(whole, weight.dtype))
        elif tf.as_dtype(weight.dtype).is_floating:
            averaged.append(weight)
    if not averaged:
        return
    weighed = [step.weigh(tf.convert_to_tensor(v._value)) for v in averaged]
    for weight, mean in zip(averaged, sum_over_replicas(weighed), strict=True):
        _assign(weight, mean)


def _assign(weight: types.KerasVariable, value: Tensor) -> None:
    with accounted.set(True):
        weight._value.assign(value)


def _correct_part(step: Step, weight: ShardedVariable, value: Tensor) -> None:
    """Makes the part that was taken of a replica's own value one of the whole batch's value.

    Updates that an optimizer has added to the part since then stay.
    """
    if not is_symbolic(value) or not step.depends(value):
        return
    if value.graph is not tf.compat.v1.get_default_graph():
        _warn_of_own_part(step, weight)
        return
    whole = on_whole_batch(step, value, f"The weight {weight.path!r}")
    if whole is None:
        whole = sum_over_replicas([step.weigh(value)])[0]
    change = tf.cast(whole - value, weight.kept.dtype)
    weight.kept.assign_add(own_shard(change, weight.kept_layout))


def _warn_of_own_part(step: Step, weight: ShardedVariable) -> None:
    if not step.is_whole:
        warn(
            f"Within a condition or a loop the step gives the weight {weight.path!r}, which is "
            "divided over the processes, a value that depends on the examples of the batch. Each "
            f"of the {step.replicas} replicas keeps its part of the value that its own examples "
            "give. Assign it outside of the condition, or gather the examples first: "
            "tf.distribute.get_replica_context().all_gather(inputs, axis=0).",
            EquivalenceWarning,
        )


def _as_assigned(original: property) -> property:
    """Reads a weight that the step has assigned as the tensor that it was given.

    A variable hides what its value is computed from. An average of codewords divides by counts that
    were assigned just before: on one device these are counts of the whole batch.
    """

    def value(self: types.KerasVariable) -> Any:
        if self.trainable:
            warn_of_own_start(self)
            return original.fget(self)  # type: ignore[misc]
        tensor = _given_by_examples(self)
        if tensor is None:
            return original.fget(self)  # type: ignore[misc]
        tensor = _of_whole_batch(self, tensor)
        # On one device a gradient does not pass through an assignment either.
        read = tf.ensure_shape(tf.stop_gradient(tf.cast(tensor, self.dtype)), self.shape)
        return assignable(self._maybe_autocast(read), self)

    return property(value)


def _of_whole_batch(weight: types.KerasVariable, value: Tensor) -> Tensor:
    """The value that a weight has on one device, if the program reads it after an assignment.

    Layers of Keras's own normalize a batch by a replica's own statistics.
    """
    step = current_step()
    if step is None or step.is_whole or leaves_to_updates(step.model) or holds_own_rows(weight):
        return value
    if isinstance(weight, ShardedVariable) or is_of_keras(step, weight):
        return value
    # `weight.dtype` is that of the layer that reads it, which may compute in halves.
    whole = at_once(step.beside_gathered(), value, f"The weight {weight.path!r}")
    whole = tf.cast(whole, weight._value.dtype)
    _assign(weight, whole)
    del step.assigned[id(weight)]  # Nothing is left to average at the end of the step.
    return whole


def _given_by_examples(weight: types.KerasVariable) -> Tensor | None:
    """The value that the step has given a weight last, if it depends on the examples."""
    step = current_step()
    _, value = (None, None) if step is None else step.assigned.get(id(weight), (None, None))
    if step is None or not is_symbolic(value):
        return None
    here = value.graph is tf.compat.v1.get_default_graph()
    return value if here and step.beside_gathered().depends(value) else None


def warn_of_own_start(weight: types.KerasVariable) -> None:
    """Warns if a weight that is trained is read after a step has given it a value by its examples.

    A branch hides what it computes, as that of `SpectralNormalization`, in which no example is.
    Gradients that a step computes with, as in sharpness-aware minimization, are exchanged.
    """
    step, value = current_step(), _given_by_examples(weight)
    if step is None or value is None or step.is_whole or exchanged.is_up:
        return
    check_moved(step)
    found = reduction_of(value, step.depends, step.averages())
    of_gradients = any(id(leaf.tensor) in step.gradients for leaf in found.leaves)
    if not (found.unknown or of_gradients):
        warn(
            f"The step gives the weight {weight.path!r}, which is trained, a value that depends on "
            "the examples of the batch, as initializations by data do, and reads it. Each of the "
            f"{step.replicas} replicas reads that of its own examples; the average over the "
            "replicas is kept after the step. Initialize the weight before fit, or gather the "
            "examples first: tf.distribute.get_replica_context().all_gather(inputs, axis=0).",
            EquivalenceWarning,
        )


def assignable(read: Tensor, weight: types.KerasVariable) -> Tensor:
    """A weight's value that can be assigned as TensorFlow's variable, which it stands for."""
    for name in ("assign", "assign_add", "assign_sub"):
        setattr(read, name, getattr(weight, name))
    for name, change in CHANGES.items():
        setattr(read, name, functools.partial(_assign_changed, weight, change))
    setattr(read, "read_value", lambda: read)  # noqa: B010
    return read


def _assign_changed(
    weight: types.KerasVariable, change: Callable[..., Tensor], *args: object, **kwargs: object
) -> object:
    return weight.assign(change(tf.convert_to_tensor(weight.value), *args, **kwargs))


def note_assigned(weight: types.KerasVariable, value: Tensor) -> None:
    """Notes that a step gives a divided weight a value."""
    step = current_step()
    if step is not None and not exchanged.is_up:
        step.assigned[id(weight)] = (weight, value)


def _notice_assignment(original: Callable[..., None]) -> Callable[..., None]:
    """Keras lets each replica keep the values that its own examples gave a weight."""

    def assign(self: types.KerasVariable, value: Tensor) -> None:
        with accounted.set(True):
            return original(self, value)

    @functools.wraps(original)
    def direct_assign(self: types.KerasVariable, value: Tensor) -> None:
        if exchanged.is_up:
            return original(self, value)
        step = current_step()
        if step is None:
            if self.synchronization != "on_read":
                if tf.as_dtype(self.dtype).is_floating and not holds_own_rows(self):
                    warn_of_own_value(f"the weight {self.path!r}", value)
            elif tf.distribute.in_cross_replica_context():
                # TensorFlow would add up all replicas' values for a result that Keras drops.
                with accounted.set(True):
                    self._value.assign(tf.cast(value, self._value.dtype), read_value=False)
                return None
            return assign(self, value)
        if self.synchronization == "on_read":
            old = tf.convert_to_tensor(self.value)
            value = of_replica(step, self, value, old=None)
            return assign(self, step.keep_if_empty(tf.cast(value, old.dtype), old))
        dtype = tf.as_dtype(self.dtype)
        if dtype.is_floating or dtype.is_integer or dtype.is_bool:
            step.assigned[id(self)] = (self, value)
        return assign(self, value)

    return direct_assign


def warn_of_own_value(subject: str, value: object) -> None:
    """Warns of a variable that a loop or predict gives another value on each replica.

    Args:
        subject: the variable, in the middle of a sentence.
        value: its new value on this replica.
    """
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1 or tf.distribute.get_replica_context() is None:
        return
    if not is_symbolic(value) or Dependence(exchanged_in_loop())(value):
        predicts = settling.value is not None
        advice = (
            "Change it in fit or evaluate, where it gets the whole batch's value"
            if predicts
            else "Average the value first: "
            "tf.distribute.get_replica_context().all_reduce('MEAN', value); or train by "
            "Model.fit, which does so"
        )
        warn(
            f"Within {'predict' if predicts else 'Strategy.run'} {subject} is given a value that "
            "depends on the replica's own examples, as moving statistics do, and each of the "
            f"{strategy.num_replicas_in_sync} replicas keeps its own. {advice}.",
            EquivalenceWarning,
        )


def _read_first(to: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        """Reads a variable that is held once for each replica before it is turned into a number."""

        @functools.wraps(original)
        def convert(self: types.KerasVariable, *args: object) -> object:
            if not is_distributed(self.value):
                return original(self, *args)
            return to(tf.convert_to_tensor(self.value).numpy(), *args)

        return convert

    return make


def _with_value(original: Callable[[Any], str]) -> Callable[[Any], str]:
    """The text of a variable that is held once for each replica shows no value."""

    @functools.wraps(original)
    def text(self: types.KerasVariable) -> str:
        shown = original(self)
        if "value=" in shown or not tf.executing_eagerly() or not is_distributed(self._value):
            return shown
        return f"{shown[:-1]}, value={tf.convert_to_tensor(self._value).numpy()}>"

    return text


def _own_seed_per_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """Folds the replica's number into the seeds it draws.

    The generator's state is the same on all replicas, so they would all draw the same dropout mask.
    Replica 0 draws the same numbers as one device.
    """

    @functools.wraps(original)
    def next_seed(self: types.SeedGenerator, ordered: bool = True) -> Tensor:
        seed = original(self, ordered)
        context = tf.distribute.get_replica_context()
        if current_step() is None or context is None:
            return seed
        replica = context.replica_id_in_sync_group
        offset = tf.cast(replica, seed.dtype) * tf.constant([7919, 0], seed.dtype)
        return seed + offset

    return next_seed
