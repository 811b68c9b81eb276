"""Optimizers whose weights are on servers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._keras import keras_backend as backend
from tfdist._keras import keras_optimizers as optimizers
from tfdist._tf.distribute import outside_of_function
from tfdist.errors import ConfigError
from tfdist.keras.replica_context import current_step
from tfdist.strategies.parameter_server.loss_scaling import rescaled, scale_of, unscaling
from tfdist.strategies.parameter_server.payload import Payload, applying, effects_of
from tfdist.strategies.parameter_server.remote_step import (
    NotSplittable,
    ServedStep,
    Update,
    current_served_step,
    parts_of,
)
from tfdist.strategies.parameter_server.servers import Servers
from tfdist.strategies.parameter_server.sharded_variable import Partitioned
from tfdist.types import Gradient, KerasVariable, Optimizer

__all__ = ["sent_to"]

#: Optimizers that treat each number of a weight by itself, so that parts of it can be updated.
_BY_ELEMENT = (
    optimizers.SGD,
    optimizers.Adam,
    optimizers.Nadam,
    optimizers.Adamax,
    optimizers.Adagrad,
    optimizers.Adadelta,
    optimizers.RMSprop,
    optimizers.Ftrl,
    optimizers.Lion,
)


def sent_to(servers: Servers) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes an optimizer's `apply` send the gradients to the servers and run there."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        """Servers apply gradients, in the order in which the chief sends them."""

        @functools.wraps(original)
        def apply(
            self: Optimizer,
            grads: Sequence[Gradient | None],
            trainable_variables: Sequence[KerasVariable] | None = None,
        ) -> object:
            if applying.is_up or not len(grads):
                return original(self, grads, trainable_variables)
            step = current_served_step()
            if step is None and tf.executing_eagerly():
                return original(self, grads, trainable_variables)
            variables = _built(self, trainable_variables)
            _check_parts(self, variables)
            _check_gradients(step, grads)

            scale = scale_of(self, step)
            if scale is not None:
                with tf.device(servers.devices[0]):
                    scale = tf.identity(scale)

            def run(each_grads: list[Any], each_variables: list[Any]) -> None:
                with tf.device(servers.devices[0]), unscaling(scale):
                    whole = _named(each_variables, variables)
                    original(self, rescaled(self, scale, each_grads), whole)
                    _constrain(variables)

            if step is None:
                _apply_alone(servers, run, list(grads), variables)
                return None
            beside = () if scale is None else (scale,)
            step.apply(Update(run, list(grads), variables, beside))
            return None

        return apply

    return make


def _built(optimizer: Optimizer, variables: Sequence[KerasVariable] | None) -> list[Any]:
    """The variables that an optimizer updates, for which it then has its own."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if variables is None:
        return list(inner._trainable_variables)
    given: list[Any] = list(variables)
    if not optimizer.built:
        # Outside of the step's graph, where Keras can name the weight beside which a new one lies.
        with (
            applying.up(),
            outside_of_function(tf.distribute.get_strategy()),
            backend.name_scope(optimizer.name, caller=optimizer),
        ):
            optimizer.build(given)
        optimizer.built = True
    return given


def _named(targets: list[Any], variables: list[Any]) -> list[Any]:
    """Keras's variables in place of TensorFlow's, for optimizers that go by the path of a weight.

    Parts of a variable that is split over servers stay as they are.
    """
    known = {id(parts_of(v)[0]): v for v in variables if len(parts_of(v)) == 1}
    return [known.get(id(target), target) for target in targets]


def _check_parts(optimizer: Optimizer, variables: list[Any]) -> None:
    """Rejects optimizers that cannot work on a variable that is split over servers."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    split = [v for v in variables if len(parts_of(v)) > 1]
    if not split:
        return
    why = None
    if not isinstance(inner, _BY_ELEMENT):
        why = f"the optimizer {type(inner).__name__}, which looks at whole variables"
    elif inner.gradient_accumulation_steps:
        why = f"gradient_accumulation_steps={inner.gradient_accumulation_steps}"
    elif inner.clipnorm is not None:
        why = f"clipnorm={inner.clipnorm}, the norm of a whole variable"
    if why:
        raise ConfigError(
            f"The variable {split[0].path!r} of shape {tuple(split[0].shape)} is split over "
            f"{len(parts_of(split[0]))} servers, which conflicts with {why}. Keep variables whole "
            "with max_shards=1 (or a larger min_shard_bytes), or change the optimizer."
        )


def _check_gradients(step: ServedStep | None, grads: Sequence[Gradient | None]) -> None:
    """Has a step computed as a whole that changes its gradients, as by clipping them.

    Raises:
        NotSplittable: if the step is one of several parts.
    """
    part = current_step()
    if part is None or step is None or step.parts == 1 or not part.gradients:
        return
    if any(g is not None and id(g) not in part.gradients for g in grads):
        raise NotSplittable("changes gradients before it applies them")


def _constrain(variables: list[Any]) -> None:
    """Keras constrains whole variables by itself, and does not know those in parts."""
    for variable in variables:
        if isinstance(getattr(variable, "_value", None), Partitioned) and variable.constraint:
            variable._value.assign(variable.constraint(tf.convert_to_tensor(variable._value)))


def _apply_alone(
    servers: Servers, run: Callable[..., None], grads: list[Any], variables: list[Any]
) -> None:
    """Applies the gradients of a loop written by hand, all at one moment."""
    pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
    payload = Payload(servers, pairs, [])
    with tf.control_dependencies(payload.arrived):
        held = servers.lock.acquire()

    def update() -> None:
        run(payload.values, payload.targets)
        with tf.device(servers.devices[0]):
            servers.updates.version.assign_add(1, read_value=False)

    with tf.control_dependencies([held]), applying.up():
        done = effects_of(update)
    servers.lock.release(held, done)
