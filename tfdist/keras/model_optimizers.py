"""The optimizers of a model: in its attributes, in containers, and those that its steps apply."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tfdist.types import Model, Optimizer
from tfdist.utils.thread_state import Current

__all__ = ["note_applied", "optimizers_in", "optimizers_of", "stepping"]

#: For each model the optimizers that its steps have applied, which may be in closures alone: in the
#: order in which they were, the same on all replicas.
_applied: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


#: The model whose step the calling replica runs.
stepping: Current[Model | None] = Current(None)


def note_applied(optimizer: Optimizer) -> None:
    """Notes an optimizer that the present step of a model applies."""
    if stepping.value is None:
        return
    noted = _applied.setdefault(stepping.value, [])
    if not any(reference() is optimizer for reference in noted):
        noted.append(weakref.ref(optimizer))


def optimizers_of(model: Model | None) -> list[Any]:
    """The optimizers in a model's attributes, then others that its steps have applied, each once.

    Args:
        model: a Keras model; None has no optimizers.
    """
    result = {id(each): each for each in optimizers_in(model)}
    if model is not None:
        noted = (reference() for reference in _applied.get(model, ()))
        result.update((id(each), each) for each in noted if each is not None)
    return list(result.values())


def optimizers_in(model: Model | None) -> list[Any]:
    """The optimizers in a model's attributes, each once: those that another process finds as well.

    Lists, tuples, sets and dictionaries are searched, however deeply nested, and
    the attributes of the layers and models within. The optimizer that another one wraps, as
    `LossScaleOptimizer` does, is not listed by itself.

    Args:
        model: a Keras model; None has no optimizers.
    """
    result: dict[int, Any] = {}
    for layer in _layers(model):
        for value in [*vars(layer).values(), getattr(layer, "optimizer", None)]:
            for optimizer in _in(value, set()):
                result[id(optimizer)] = optimizer
    return list(result.values())


def _layers(model: Model | None) -> list[Any]:
    if model is None:
        return []
    if not hasattr(model, "_flatten_layers"):
        return [model]
    return list(model._flatten_layers(include_self=True, recursive=True))


def _in(value: object, seen: set[int]) -> Iterator[Any]:
    """The optimizers in a value; `seen` ends the search in containers that hold themselves."""
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
        return
    if not isinstance(value, (Mapping, list, tuple, set, frozenset)) or id(value) in seen:
        return
    seen.add(id(value))
    for each in value.values() if isinstance(value, Mapping) else value:
        yield from _in(each, seen)
