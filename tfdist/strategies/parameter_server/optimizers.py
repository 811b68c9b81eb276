"""Optimizers whose weights are on servers, and the scales of their losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._keras import BaseOptimizer, LossScaleOptimizer, MultiOptimizer, unwrapped
from tfdist._keras import keras_optimizers as optimizers
from tfdist.errors import ConfigError
from tfdist.keras.building import build_optimizer
from tfdist.keras.gradient_functions import overwritten_in
from tfdist.keras.hooks import Hook
from tfdist.keras.replica_context import current_step
from tfdist.strategies.parameter_server.payload import (
    Change,
    Payload,
    applying,
    effects_of,
    scaled,
)
from tfdist.strategies.parameter_server.remote_step import (
    NotSplittable,
    RemoteStep,
    TraceAgain,
    Update,
    remote_step,
)
from tfdist.strategies.parameter_server.servers import Partitioned, Servers, parts_of
from tfdist.types import Gradient, KerasVariable, LossScaler, Optimizer, Tensor
from tfdist.utils.thread_state import Current

__all__ = ["hooks"]

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


def hooks(servers: Servers) -> list[Hook]:
    """The seams at which a loss is scaled, and gradients are applied."""
    classes = [BaseOptimizer, LossScaleOptimizer, MultiOptimizer]
    return [
        *(Hook(c, "apply", functools.partial(_sent, servers)) for c in classes if c is not None),
        Hook(LossScaleOptimizer, "scale_loss", _noted),
        Hook(LossScaleOptimizer, "_stateful_handle_non_finite_grads", _halved),
    ]


def _sent(servers: Servers, original: Callable[..., Any]) -> Callable[..., Any]:
    """Servers apply gradients, in the order in which the chief sends them."""

    @functools.wraps(original)
    def apply(
        self: Optimizer,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[KerasVariable] | None = None,
    ) -> object:
        step = remote_step.value
        alone = step is None and tf.executing_eagerly()
        if applying.is_up or alone or not len(grads):
            return original(self, grads, trainable_variables)
        variables = _built(self, trainable_variables)
        _check_parts(self, variables)
        _check_gradients(step, grads, variables)
        _mark_parts(variables)
        scale = _scale_of(self, step)
        if scale is not None:
            with tf.device(servers.devices[0]):
                scale = tf.identity(scale)

        def run(each_grads: list[Any], each_variables: list[Any]) -> None:
            with tf.device(servers.devices[0]), _scale.set(scale):
                whole = _named(each_variables, variables)
                original(self, _rescaled(self, scale, each_grads), whole)
                _constrain(variables)

        if step is None:
            _apply_alone(servers, run, list(grads), variables)
        else:
            beside = () if scale is None else (scale,)
            step.apply(Update(run, list(grads), variables, beside, self))
        return None

    return apply


def _built(optimizer: Optimizer, variables: Sequence[KerasVariable] | None) -> list[Any]:
    """The variables that an optimizer updates, for which it then has its own."""
    if variables is None:
        return list(unwrapped(optimizer)._trainable_variables)
    # Keras then can name the weight beside which a new one lies.
    with applying.up():
        build_optimizer(optimizer, list(variables))
    return list(variables)


def _named(targets: list[Any], variables: list[Any]) -> list[Any]:
    """Keras's variables in place of TensorFlow's, for optimizers that go by the path of a weight.

    Parts of a variable that is split over servers stay as they are.
    """
    known = {id(parts_of(v)[0]): v for v in variables if len(parts_of(v)) == 1}
    return [known.get(id(target), target) for target in targets]


def _mark_parts(variables: list[Any]) -> None:
    """Has Keras overwrite the parts of a variable that it overwrites with its gradient."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            for part in parts_of(variable):
                part.overwrite_with_gradient = True


def _check_parts(optimizer: Optimizer, variables: list[Any]) -> None:
    """Rejects optimizers that cannot work on a variable that is split over servers."""
    inner = unwrapped(optimizer)
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


def _check_gradients(
    step: RemoteStep | None, grads: Sequence[Gradient | None], variables: list[Any]
) -> None:
    """Has a step computed as a whole that changes its gradients, or computes them without a tape.

    So is one whose gradients are the largest values of the batch, as of layers in float8.

    Raises:
        NotSplittable: if the step is one of several parts.
    """
    part = current_step()
    if part is None or step is None or step.parts == 1:
        return
    if any(g is not None and id(g) not in part.gradients for g in grads):
        raise NotSplittable("changes gradients before it applies them, or computes them by hand")
    if overwritten_in(variables) is not None:
        raise NotSplittable("takes the largest values of the batch, for layers in float8")


def _constrain(variables: list[Any]) -> None:
    """Keras constrains whole variables by itself, and does not know those in parts."""
    for variable in variables:
        if isinstance(getattr(variable, "_value", None), Partitioned) and variable.constraint:
            variable._value.assign(variable.constraint(tf.convert_to_tensor(variable._value)))


def _apply_alone(
    servers: Servers, run: Callable[..., None], grads: list[Any], variables: list[Any]
) -> None:
    """Applies the gradients of a loop written by hand, all at one moment."""
    pairs = zip(variables, grads, strict=True)
    payload = Payload(servers, [Change(v, g) for v, g in pairs if g is not None])
    with tf.control_dependencies(payload.arrived):
        held = servers.lock.acquire()

    def update() -> None:
        run([each.value for each in payload.pieces], [each.variable for each in payload.pieces])
        with tf.device(servers.devices[0]):
            servers.updates.version.assign_add(1, read_value=False)

    with tf.control_dependencies([held]), applying.up():
        done = effects_of(update)
    servers.lock.release(held, done)


# Loss scales: a gradient is unscaled by the scale that its loss was multiplied with.
#
# Other updates may change the scale between a step's read of it and the step's own update. Keras
# divides by the scale that it finds then, and takes the initial one, as a constant of the graph,
# while the optimizer has no variables yet.

#: The scale that an overflow is to halve, not what others have made of it meanwhile.
_scale: Current[Tensor | None] = Current(None)


def _scale_of(optimizer: Optimizer, step: RemoteStep | None) -> Tensor | None:
    """The scale of the loss whose gradients an optimizer is given in a step; None if it has none.

    Raises:
        TraceAgain: if the loss was scaled before the optimizer had its variables.
    """
    if step is None or id(optimizer) not in step.scales:
        return None
    scale = step.scales[id(optimizer)]
    if scale is None:
        raise TraceAgain
    return scale


def _rescaled(optimizer: Any, scale: Tensor | None, grads: list[Any]) -> list[Any]:
    """Gradients as if their loss had been scaled by the divisor that the optimizer will use.

    Scales are powers of two unless the program starts from another number: nothing is rounded.
    """
    if scale is None:
        return grads
    factor = tf.convert_to_tensor(optimizer.dynamic_scale) / scale
    return [
        scaled(grad, lambda numbers: numbers * tf.cast(factor, numbers.dtype)) for grad in grads
    ]


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """A late gradient is divided by the scale that its loss was multiplied by."""

    @functools.wraps(original)
    def scale_loss(self: LossScaler, loss: Tensor) -> Tensor:
        step = remote_step.value
        if step is not None:
            scale = tf.convert_to_tensor(self.dynamic_scale) if self.built else None
            step.scales[id(self)] = scale
        return original(self, loss)

    return scale_loss


def _halved(original: Callable[..., None]) -> Callable[..., None]:
    """Steps that were under way together and all overflow halve the scale once."""

    @functools.wraps(original)
    def handle_non_finite_grads(self: LossScaler) -> None:
        scale = _scale.value
        if scale is None:
            return original(self)
        self.step_counter.assign(0)
        now = tf.convert_to_tensor(self.dynamic_scale)
        self.dynamic_scale.assign(tf.minimum(now, scale * 0.5))

    return handle_non_finite_grads
