"""The costs of each layer of a model: time, weights and activations."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.placement.units import Unit, units_of
from tfdist.types import KerasVariable, Model, Structure

__all__ = ["Cost", "costs_of"]

#: A backward pass computes about as much again for the inputs and for the weights.
_FORWARD_AND_BACKWARD = 3.0
_REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The costs of a layer in a step of training.

    Attributes:
        path: the layer's path.
        seconds: its forward and backward pass.
        parameters: numbers in its weights.
        weight_bytes: its weights, their gradients and the optimizer's state.
        activation_bytes: the bytes kept for the backward pass, by the size of its output.
    """

    path: str
    seconds: float
    parameters: int
    weight_bytes: int
    activation_bytes: int

    @property
    def memory(self) -> int:
        """Bytes on its device."""
        return self.weight_bytes + self.activation_bytes


def costs_of(model: Model, batch: Structure, *, slots: int = 2) -> list[Cost]:
    """Measures the layers of a model, each by itself, on the first device.

    A forward pass is timed and counts three times, for the backward pass. The first pass is not
    timed. The activations that a layer keeps are estimated by the size of its output.

    Args:
        model: a Keras model that is built.
        batch: inputs of the size that a step has: an array or a nest of arrays.
        slots: values that the optimizer keeps for each weight, such as 2 for Adam.

    Returns:
        One cost for each unit, in their order.
    """
    units = units_of(model)
    times: dict[int, list[float]] = {id(unit.operation): [] for unit in units}
    sizes: dict[int, int] = {}
    inputs = keras.tree.map_structure(tf.convert_to_tensor, batch)
    with _watched(units, times, sizes):
        for _ in range(_REPEATS + 1):
            model(inputs, training=False)
    return [
        _cost_of(unit, times[id(unit.operation)], sizes.get(id(unit.operation), 0), slots)
        for unit in units
    ]


def _cost_of(unit: Unit, times: Sequence[float], size: int, slots: int) -> Cost:
    weights = unit.operation.weights if unit.is_layer else []
    trainable = unit.operation.trainable_weights if unit.is_layer else []
    held = sum(_bytes(weight) for weight in weights)
    learned = sum(_bytes(weight) for weight in trainable)
    calls = len(times) // (_REPEATS + 1)
    each = [sum(times[i : i + calls]) for i in range(calls, len(times), max(calls, 1))]
    return Cost(
        path=unit.path,
        seconds=_FORWARD_AND_BACKWARD * statistics.median(each or [0.0]),
        parameters=sum(int(weight.value.shape.num_elements()) for weight in weights),
        weight_bytes=held + (1 + slots) * learned,
        activation_bytes=size,
    )


def _bytes(weight: KerasVariable) -> int:
    return int(weight.value.shape.num_elements()) * int(tf.as_dtype(weight.dtype).size)


@contextlib.contextmanager
def _watched(
    units: Sequence[Unit], times: dict[int, list[float]], sizes: dict[int, int]
) -> Iterator[None]:
    """Times the calls of units and notes the sizes of their outputs."""
    calls = [(unit.operation, vars(unit.operation).get("call")) for unit in units]
    for unit in units:
        key = id(unit.operation)
        watched = _timed(unit.operation.call, times[key], sizes, key)
        object.__setattr__(unit.operation, "call", watched)
    try:
        yield
    finally:
        for operation, own in calls:
            if own is None:
                object.__delattr__(operation, "call")
            else:
                object.__setattr__(operation, "call", own)


def _timed(
    call: Callable[..., Any], times: list[float], sizes: dict[int, int], key: int
) -> Callable[..., Any]:
    def run(*args: object, **kwargs: object) -> object:
        begun = time.perf_counter()
        outputs = call(*args, **kwargs)
        tensors = [each for each in keras.tree.flatten(outputs) if tf.is_tensor(each)]
        for tensor in tensors:
            tensor.numpy()  # A device may still compute.
        times.append(time.perf_counter() - begun)
        sizes[key] = sum(int(tf.size(t)) * int(t.dtype.size) for t in tensors)
        return outputs

    return run
