"""The exchange of gradients: before the optimizer sees them, so that all of it acts on the average.

Keras all-reduces inside `apply`, after clipping, inside the conditional of gradient accumulation,
and after the check for infinities of dynamic loss scaling. N processes then clip, accumulate and
skip differently from one. Here the average is taken first and everything else is as on one device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._keras import Adam, BaseOptimizer, LossScaleOptimizer, TFOptimizer
from tfdist.comm.batch_dependence import is_symbolic
from tfdist.comm.halves import as_of_halves, is_of_halves
from tfdist.comm.replica_collectives import sum_over_replicas
from tfdist.gradients.optimizer_state import updater_of
from tfdist.keras import zero
from tfdist.keras.assignments import at_once
from tfdist.keras.building import build_optimizer, has_own_step, scale_of
from tfdist.keras.custom_gradients import check_unchanged
from tfdist.keras.gradient_functions import check_overwritten
from tfdist.keras.hooks import Hook, accounted, by_example, exchanged, on_gradients
from tfdist.keras.losses import has_weights, is_of_examples, with_shares
from tfdist.keras.model_optimizers import note_applied
from tfdist.keras.replica_context import (
    Step,
    current_step,
    weighed,
)
from tfdist.keras.updating import step_by_rule
from tfdist.keras.whole_batch import as_average, note_meeting
from tfdist.sharding.exchange import own_shard
from tfdist.types import Adam as AdamOptimizer
from tfdist.types import (
    Gradient,
    KerasVariable,
    LossScaler,
    Operand,
    Optimizer,
    Structure,
    Tensor,
    Variable,
)
from tfdist.utils.thread_state import Flag

__all__ = ["adam_while", "exchange", "hooks"]


# Adam's dense update as one kernel, which reads and writes memory once instead of ten times.
#
# TensorFlow's `ResourceApplyAdam` computes the formula of `keras.optimizers.Adam`, but takes the
# float32 beta2 from 1, where Keras takes the exact one: for 0.999 that leaves 5e-5 more. Its
# second moment is larger by as much, so the learning rate and epsilon are made larger by the
# square root of that: the weights are then Keras's to 1e-8 after 50 steps.


def adam_while(flag: Flag) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes `Adam.update_step` one kernel while a flag is up.

    Args:
        flag: set while gradients are applied that all replicas share.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        """Adam lets a replica update rows of its own where gradients are sparse."""

        @functools.wraps(original)
        def update_step(
            self: AdamOptimizer, gradient: Tensor, variable: Variable, learning_rate: Operand
        ) -> object:
            plain = isinstance(gradient, tf.Tensor) and not self.amsgrad
            if not (flag.is_up and plain and variable.dtype in (tf.float32, "float32")):
                return original(self, gradient, variable, learning_rate)
            index = self._get_variable_index(variable)
            m, v = self._momentums[index].value, self._velocities[index].value
            step = tf.cast(self.iterations + 1, tf.float32)
            larger = math.sqrt((1 - float(np.float32(self.beta_2))) / (1 - self.beta_2))
            return tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=tf.pow(tf.constant(self.beta_1, tf.float32), step),
                beta2_power=tf.pow(tf.constant(self.beta_2, tf.float32), step),
                lr=tf.cast(learning_rate, tf.float32) * larger,
                beta1=tf.constant(self.beta_1, tf.float32),
                beta2=tf.constant(self.beta_2, tf.float32),
                epsilon=tf.constant(self.epsilon * larger, tf.float32),
                grad=tf.cast(gradient, tf.float32),
            )

        return update_step

    return make


def hooks() -> list[Hook]:
    """The seams of Keras's optimizers."""
    return [
        Hook(BaseOptimizer, "apply", _exchange_first),
        Hook(LossScaleOptimizer, "apply", _exchange_first),
        Hook(LossScaleOptimizer, "_tf_apply", _apply_in_replica),
        Hook(BaseOptimizer, "scale_loss", _note_final_loss),
        Hook(LossScaleOptimizer, "scale_loss", _weigh_scaled_loss),
        *on_gradients(_note_gradients, priority=2),
        Hook(TFOptimizer, "_all_reduce_sum_gradients", _skip_if_exchanged),
        Hook(Adam, "update_step", adam_while(exchanged)),
    ]


def exchange(grads: list[Any], optimizer: Optimizer | None) -> list[Any]:
    """Averages gradients over the replicas, weighted by examples.

    Outside of a Keras step, where a training loop scales its own loss, gradients are summed: the
    meaning that `tf.distribute` gives to `apply_gradients`.

    Args:
        grads: one dense tensor, `IndexedSlices` or None for each weight.
        optimizer: the optimizer that they are for.

    Returns:
        The reduced gradients, None if there was None.
    """
    own = [g for g in grads if g is not None]
    if not own:
        return grads
    sum_gradients = getattr(tf.distribute.get_strategy(), "sum_gradients", sum_over_replicas)
    sums = zip(own, sum_gradients(weighed(own, optimizer)), strict=True)
    reduced = iter([as_of_halves(total) if is_of_halves(g) else total for g, total in sums])
    return [None if g is None else next(reduced) for g in grads]


def _exchange_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients are averaged before they are clipped, accumulated and applied, as on one device."""

    @functools.wraps(original)
    def apply(
        self: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[KerasVariable] | None = None,
    ) -> object:
        if exchanged.is_up:
            return zero.apply_reduced(original, self, grads, trainable_variables)
        if tf.distribute.in_cross_replica_context():
            _apply_everywhere(original, self, list(grads), trainable_variables)
            return None
        grads, step = list(grads), current_step()
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            build_optimizer(self, trainable_variables)
        note_applied(self)
        if step is not None and not step.exchanges_at_tape:
            check_unchanged(step, grads)
        updater = updater_of(self, tf.distribute.get_strategy())
        weights = self._trainable_variables if trainable_variables is None else trainable_variables
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if replicas > 1:
            check_overwritten(weights, f"{replicas} replicas")
        is_whole = step is not None and (step.exchanges_at_tape or not step.gradients)
        is_own = updater is not None and updater.rule.periodic
        if step is not None and is_whole and not is_own:
            grads = [_of_one_device(step, *pair) for pair in zip(grads, weights, strict=True)]
        if updater is not None and not (is_whole and updater.rule.is_exact):
            with accounted.set(True):
                step_by_rule(updater, self, grads, trainable_variables)
            return None
        if step is not None and step.exchanges_at_tape:
            return zero.apply_reduced(original, self, grads, trainable_variables)
        to_shards = zero.stage(tf.distribute.get_strategy()) > 1
        with zero.to_optimizer():
            reduce = zero.reduce_to_shards if to_shards else _reduce
            grads = reduce(grads, weights, self)
        return zero.apply_reduced(original, self, grads, trainable_variables, shards=to_shards)

    return apply


def _of_one_device(step: Step, grad: Any, weight: Any) -> Any:
    """A gradient that a step has changed by numbers of its examples, or computed without a tape."""
    if not is_symbolic(grad):
        return grad
    whole = at_once(step, grad, f"The gradient of {weight.path!r}")
    by_hand = not step.gradients and zero.is_reduced_by_tape(weight)
    return own_shard(whole, weight.kept_layout) if by_hand else whole


def _reduce(grads: list[Any], weights: Sequence[Any], optimizer: Optimizer) -> list[Any]:
    """Averages gradients over the replicas, but for those that a tape has returned as averages."""
    done = [zero.is_reduced_by_tape(each) for each in weights]
    if not any(done):
        return exchange(grads, optimizer)
    own = [None if is_done else each for each, is_done in zip(grads, done, strict=True)]
    pairs = zip(grads, exchange(own, optimizer), strict=True)
    return [mine if total is None else total for mine, total in pairs]


def _note_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes the gradients of weights, and exchanges them if the step is going to change them."""

    @functools.wraps(original)
    def gradient(
        self: object, target: Structure, sources: Structure, *args: object, **kwargs: object
    ) -> Structure:
        result, step = original(self, target, sources, *args, **kwargs), current_step()
        if tf.executing_eagerly() or by_example.is_up or not has_weights(sources, step):
            return result
        flat = tf.nest.flatten(result)
        if step is None:
            zero.note_shards(tf.nest.flatten(sources), flat)
            return result
        is_own = [is_of_examples(step, each) for each in tf.nest.flatten(sources)]
        shared = [None if own else each for each, own in zip(flat, is_own, strict=True)]
        if step.exchanges_at_tape:
            scaled = [t for t in tf.nest.flatten(target) if id(t) in step.scaled_losses]
            own = [with_shares(step, each, inverse=True) for each in shared]
            shared = exchange(own, step.scaled_losses[id(scaled[0])][1] if scaled else None)
            shared = [with_shares(step, each) for each in shared]
            for each in tf.nest.flatten(shared, expand_composites=True):
                if each is not None:
                    step.depends.note_shared(each)
        zero.note_shards(tf.nest.flatten(sources), shared)
        step.gradients.update((id(each), each) for each in shared if each is not None)
        mixed = zip(flat, shared, is_own, strict=True)
        return tf.nest.pack_sequence_as(result, [a if own else b for a, b, own in mixed])

    return gradient


def _apply_everywhere(original: Callable[..., Any], *args: Any) -> None:
    """Applies gradients of a loop without `Strategy.run`, as one device would.

    Such a loop sees the whole batch on every worker, so its gradients are the same everywhere and
    each replica applies them to its own copy.
    """

    def on_replica() -> None:
        zero.apply_reduced(original, *args)

    tf.distribute.get_strategy().run(on_replica)


def _apply_in_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decides on infinities in the replica: after the exchange all replicas see the same."""

    @functools.wraps(original)
    def tf_apply(
        self: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[KerasVariable] | None = None,
    ) -> object:
        if exchanged.is_up:
            return self._common_apply(grads, trainable_variables=trainable_variables)
        return original(self, grads, trainable_variables)

    return tf_apply


def _note_final_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes the loss of Keras's own `train_step`: its gradients go to `apply` as they are."""

    @functools.wraps(original)
    def scale_loss(self: Optimizer, loss: Tensor) -> Tensor:
        result, step = original(self, loss), current_step()
        if step is None or not step.even or step.is_whole or not is_symbolic(result):
            return result
        methods = ("apply", "apply_gradients")
        own = any(getattr(type(self), each) is not getattr(BaseOptimizer, each) for each in methods)
        if not own and not has_own_step(step.model, "train_step"):
            step.final_losses[id(result)] = (result, self)
        return result

    return scale_loss


def _weigh_scaled_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that is scaled is weighed by its examples before its gradient is taken.

    It is made an average first, whatever it is: what is scaled here is not looked into any more.
    """

    @functools.wraps(original)
    def scale_loss(self: LossScaler, loss: Tensor) -> Tensor:
        step = current_step()
        if step is None and not self.built and is_symbolic(loss):
            return keras.ops.multiply(loss, scale_of(self))
        if step is None:
            return original(self, loss)
        if is_symbolic(loss):
            note_meeting(step, loss)
        return step.weigh_scaled(original(self, as_average(step, loss)), self)

    return scale_loss


def _skip_if_exchanged(original: Callable[..., Any]) -> Callable[..., Any]:
    """TensorFlow would add up gradients that are averages already."""

    @functools.wraps(original)
    def all_reduce_sum_gradients(
        self: object, grads_and_vars: Iterable[tuple[Gradient, Variable]]
    ) -> list[tuple[Gradient, Variable]]:
        return list(grads_and_vars) if exchanged.is_up else original(self, grads_and_vars)

    return all_reduce_sum_gradients
