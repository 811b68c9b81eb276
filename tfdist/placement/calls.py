"""Calls of layers on their devices, forward and backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import in_stateless_scope
from tfdist.placement.devices import on
from tfdist.types import Tensor, Variable

__all__ = ["placed_call"]

#: Runs a block on a layer's device, and marks its operations.
Placed = Callable[[], contextlib.AbstractContextManager[None]]


def placed_call(
    call: Callable[..., Any], device: str, number: int, losses: Callable[[], list[list[Any]]]
) -> Callable[..., Any]:
    """A layer's `call` that runs on a device, with its gradients.

    TensorFlow puts what a tape computes where the tape is asked, which is the first device of the
    process and not that of the layer. So the layer has a gradient of its own, with a tape inside.

    Args:
        call: the layer's method.
        device: the full name of a device.
        number: marks the layer's operations, by the name scope `placed-NUMBER`.
        losses: the lists that the layer and those in it add losses to.
    """

    @contextlib.contextmanager
    def placed() -> Iterator[None]:
        with on(device), tf.name_scope(f"placed-{number}"):
            yield

    @functools.wraps(call)
    def run(*args: object, **kwargs: object) -> object:
        symbolic = any(isinstance(e, keras.KerasTensor) for e in keras.tree.flatten((args, kwargs)))
        if symbolic or in_stateless_scope():
            return call(*args, **kwargs)
        with placed():
            return _with_own_gradient(call, placed, losses(), args, kwargs)

    return run


def _with_own_gradient(
    call: Callable[..., Any],
    placed: Placed,
    lists: list[list[Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> object:
    leaves = keras.tree.flatten((args, kwargs))
    indices = [i for i, leaf in enumerate(leaves) if _has_gradient(leaf)]
    before = [len(each) for each in lists]
    kept: dict[str, Any] = {}

    def forward(*inputs: Tensor) -> tuple[list[Tensor], Callable[..., Any]]:
        replaced = list(leaves)
        for i, value in zip(indices, inputs, strict=True):
            _copy_mask(leaves[i], value)
            replaced[i] = value
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(inputs)
            own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), replaced)
            outputs = call(*own_args, **own_kwargs)
        added = [loss for each, start in zip(lists, before, strict=True) for loss in each[start:]]
        kept["outputs"], kept["flat"] = outputs, [*keras.tree.flatten(outputs), *added]
        tensors = [each for each in kept["flat"] if tf.is_tensor(each)]
        return tensors, _backward(placed, tape, inputs, tensors)

    results = tf.custom_gradient(forward)(*(leaves[i] for i in indices))
    flat = iter(_with_own_tensors(kept["flat"], list(results)))
    result = keras.tree.map_structure(lambda _: next(flat), kept["outputs"])
    for each, start in zip(lists, before, strict=True):
        each[start:] = [next(flat) for _ in each[start:]]
    return result


def _backward(
    placed: Placed, tape: tf.GradientTape, inputs: Sequence[Any], tensors: Sequence[Any]
) -> Callable[..., Any]:
    """The function that `tf.custom_gradient` calls for the gradients, on the layer's device too."""

    def backward(*grads: Tensor, variables: Sequence[Variable] | None = None) -> object:
        pairs = [(t, g) for t, g in zip(tensors, grads, strict=True) if _has_gradient(t)]
        with placed():
            result = tape.gradient(
                [tensor for tensor, _ in pairs],
                [*inputs, *(variables or [])],
                output_gradients=[grad for _, grad in pairs],
            )
        if variables is None:
            return result
        return result[: len(inputs)], result[len(inputs) :]

    return backward


def _has_gradient(value: object) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _with_own_tensors(flat: list[Any], results: list[Any]) -> list[Any]:
    """Values of which the tensors are replaced by those with the layer's own gradient."""
    following = iter(results)
    replaced = []
    for each in flat:
        result = next(following) if tf.is_tensor(each) else each
        _copy_mask(each, result)
        replaced.append(result)
    return replaced


def _copy_mask(source: object, target: Any) -> None:
    """Keras keeps a tensor's mask as an attribute, which TensorFlow's copies do not have."""
    mask = getattr(source, "_keras_mask", None)
    if mask is not None and source is not target:
        target._keras_mask = mask
