"""Placing a model: weights, computation, gradients and the optimizer's state of each layer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import unwrapped
from tfdist.placement.calls import placed_call
from tfdist.placement.devices import device_of, existing, moved, on
from tfdist.placement.plan import plan_placement, read_device_map
from tfdist.placement.units import Unit, devices_of, units_of
from tfdist.types import (
    Gradient,
    KerasVariable,
    Layer,
    Model,
    Operand,
    Optimizer,
    Structure,
    Variable,
)
from tfdist.utils.messages import warn

__all__ = ["place"]

_CALL = "_tfdist_unplaced_call"


def place(
    model: Model,
    device_map: Mapping[str, str] | Path | str = "auto",
    *,
    batch: Structure = None,
    devices: Sequence[str] | Mapping[str, float] | None = None,
    overflow: str | None = None,
) -> Model:
    """Puts each layer of a model on a device.

    A layer's weights, its computation, gradients and optimizer's state are there; activations go
    from device to device. The model stays the Keras model that it was: `fit`, `evaluate`,
    `predict`, and `save` to an ordinary file. A placed model may be placed again.

    Args:
        model: a Keras model that is built, compiled or not. It is changed in place, and keeps its
            weights.
        device_map: rules and devices, such as `{"encoder": "GPU:0", "decoder_*": "GPU:1"}`. A rule
            is a layer's path (`encoder/conv1`), that of a model around it, a glob, or a regular
            expression after `re:`. Each layer needs exactly one device. `"auto"` measures, plans,
            and shows the plan; any other string or path is a strategy file with a table
            `[device_map]`, as `Plan.write` writes it.
        batch: with `"auto"`, inputs of the size of a step, or the number of examples.
        devices: with `"auto"`, which devices, and by option the bytes that each may use.
        overflow: with `"auto"`, a device for layers that do not fit, such as `"cpu"`.

    Returns:
        The model.

    Raises:
        ConfigError: for a layer without a rule or with two, a rule without a layer, a device that
            there is not, or a model that is not built.
    """
    units = units_of(model)
    if device_map == "auto":
        plan = plan_placement(model, batch, devices, overflow=overflow)
        print(plan.table(), file=sys.stderr, flush=True)
        device_map = plan.devices
    elif not isinstance(device_map, Mapping):
        device_map = read_device_map(device_map)
    wanted = devices_of(units, device_map)
    full = {name: existing(name) for name in sorted(set(wanted.values()))}
    for number, unit in enumerate(units):
        _place_unit(unit, full[wanted[unit.path]], number)
    _place_metrics_and_optimizer(model)
    _follow_compile(model)
    return model


def _place_unit(unit: Unit, device: str, number: int) -> None:
    for variable in unit.variables:
        moved(variable, device)
    operation = unit.operation
    original = vars(operation).get(_CALL)
    if original is None:
        original = operation.call
        object.__setattr__(operation, _CALL, original)
    losses = functools.partial(_losses_of, operation)
    object.__setattr__(operation, "call", placed_call(original, device, number, losses))


def _losses_of(operation: Layer) -> list[list[Any]]:
    """The lists that a layer and the layers in it add losses to."""
    if not isinstance(operation, keras.Layer):
        return []
    return [layer._losses for layer in operation._flatten_layers(include_self=True)]


def _follow_compile(model: Model) -> None:
    """Places the optimizer of each `compile` to come; XLA cannot compile for several devices."""
    compiled = model.compile
    if getattr(compiled, "_tfdist_placed", False):
        return

    @functools.wraps(compiled)
    def compile_placed(*args: object, **kwargs: object) -> None:
        if kwargs.get("jit_compile") is True:
            warn(
                "jit_compile=True does not go with a model on several devices, for which XLA "
                "cannot compile. The model is compiled with jit_compile=False."
            )
        compiled(*args, **{**kwargs, "jit_compile": False})
        _place_metrics_and_optimizer(model)

    compile_placed._tfdist_placed = True  # type: ignore[attr-defined]
    object.__setattr__(model, "compile", compile_placed)


def _place_metrics_and_optimizer(model: Model) -> None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return
    if model.jit_compile:
        model.jit_compile = False
    # Functions that were traced have the old devices.
    model.train_function = model.test_function = model.predict_function = None
    inner = unwrapped(optimizer)
    _follow_updates(inner)
    if inner.built:
        _move_state(inner)
    elif model.trainable_variables:
        # Now: a tensor made while a step is traced has no value yet, and cannot be moved.
        optimizer.build(model.trainable_variables)


def _follow_updates(optimizer: Optimizer) -> None:
    """Makes and updates the state of each weight on the weight's device."""
    if getattr(optimizer.update_step, "_tfdist_placed", False):
        return
    update, add = optimizer.update_step, optimizer.add_variable_from_reference

    @functools.wraps(update)
    def update_step(
        gradient: Gradient, variable: KerasVariable | Variable, learning_rate: Operand
    ) -> object:
        held = _held(variable)
        with on(held.device):
            return update(gradient, variable, learning_rate)

    @functools.wraps(add)
    def add_variable_from_reference(
        reference_variable: KerasVariable, *args: object, **kwargs: object
    ) -> KerasVariable:
        held = _held(reference_variable)
        with on(held.device):
            made = add(reference_variable, *args, **kwargs)
        moved(made, held.device)
        return made

    update_step._tfdist_placed = True  # type: ignore[attr-defined]
    object.__setattr__(optimizer, "_clip_gradients", _clipping_of(optimizer))
    object.__setattr__(optimizer, "_apply_weight_decay", _decay_of(optimizer))
    object.__setattr__(optimizer, "update_step", update_step)
    object.__setattr__(optimizer, "add_variable_from_reference", add_variable_from_reference)


def _held(variable: KerasVariable | Variable) -> Variable:
    """TensorFlow's variable in a Keras variable; any other is one itself."""
    held: Any = getattr(variable, "_value", variable)
    return held


def _clipping_of(optimizer: Optimizer) -> Callable[[Any], Any]:
    """Keras's clipping, each gradient on its device; of a global norm only sums go around."""
    original = optimizer._clip_gradients

    def clip_gradients(grads: Sequence[Gradient | None]) -> Sequence[Gradient | None]:
        if not optimizer.global_clipnorm:
            result = []
            for grad in grads:
                with on(getattr(grad, "device", "")):
                    result += original([grad])
            return result
        squares = []
        for grad in (each for each in grads if each is not None):
            with on(grad.device):
                # As Keras has it, also for the rows of a sparse gradient.
                squares.append(keras.ops.sum(keras.ops.square(grad)))
        bound = tf.constant(optimizer.global_clipnorm, squares[0].dtype)
        factor = bound * tf.minimum(1 / tf.sqrt(tf.add_n(squares)), 1 / bound)
        clipped: list[Gradient | None] = []
        for grad in grads:
            with on(getattr(grad, "device", "")):
                # Dense, as Keras's product of both is.
                clipped.append(None if grad is None else tf.convert_to_tensor(grad) * factor)
        return clipped

    return clip_gradients


def _decay_of(optimizer: Optimizer) -> Callable[[Any], None]:
    """Keras's weight decay, that of each weight on its device."""

    def apply_weight_decay(variables: Sequence[KerasVariable]) -> None:
        if optimizer.weight_decay is None:
            return
        for variable in variables:
            held = _held(variable)
            if optimizer._use_weight_decay(variable):
                with on(held.device):
                    rate = tf.cast(optimizer.learning_rate, held.dtype)
                    held.assign_sub(held * tf.cast(optimizer.weight_decay, held.dtype) * rate)

    return apply_weight_decay


def _move_state(optimizer: Optimizer) -> None:
    """Moves the state of an optimizer that has been built; Keras names it after its weight."""
    weights = {
        f"{weight.path.replace('/', '_')}_": weight for weight in optimizer._trainable_variables
    }
    for variable in optimizer.variables:
        owners = [prefix for prefix in weights if variable.name.startswith(prefix)]
        if owners:
            moved(variable, device_of(weights[max(owners, key=len)]))
