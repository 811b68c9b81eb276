"""The layers of a model that can be placed, by path."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from tfdist import types
from tfdist._keras import Functional
from tfdist.errors import ConfigError
from tfdist.types import Layer, Model

__all__ = ["Unit", "graph_of", "units_of"]


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """A part of a model that runs on one device.

    Attributes:
        path: the names of the models that it is in, and its own, joined by `/`.
        operation: a Keras layer, or an operation such as an addition of two tensors.
        follows: the path of the unit whose output it reads first; None at the input.
    """

    path: str
    operation: Layer
    follows: str | None = None

    @property
    def is_layer(self) -> bool:
        """Whether a device map must name it; an operation goes with what it follows."""
        return isinstance(self.operation, keras.Layer)

    @property
    def variables(self) -> list[Any]:
        """Keras's variables: weights, and the states of random numbers."""
        return list(self.operation.variables) if self.is_layer else []


def units_of(model: Model) -> list[Unit]:
    """The units of a model, in the order in which they run.

    Functional and Sequential models are taken apart, nested ones too. Any other layer is a unit,
    with all layers that it has inside.

    Args:
        model: a Keras model that is built.

    Raises:
        ConfigError: if the model is not built, or has weights of its own beside its layers'.
    """
    result: dict[int, Unit] = {}
    if model.built:
        for unit in _walk(model, "", {}):
            result.setdefault(id(unit.operation), unit)
    units = list(result.values())
    unbuilt = [unit.path for unit in units if unit.is_layer and not unit.operation.built]
    if unbuilt or not units:
        which = f"{model.name!r}" + (f" (layer {unbuilt[0]!r})" if unbuilt else "")
        raise ConfigError(
            f"The model {which} has no weights yet. Build it first: begin it with keras.Input, or "
            "call it on a batch."
        )
    _check_complete(model, units)
    return units


def graph_of(model: Layer) -> types.Functional | None:
    """The Functional graph of a Functional or built Sequential model, or None."""
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if isinstance(model, Functional) else None


def _walk(model: Layer, prefix: str, producers: dict[int, str]) -> Iterator[Unit]:
    graph = graph_of(model)
    if graph is None:
        for layer in model._flatten_layers(include_self=False, recursive=False):
            yield from _unit_or_inside(layer, prefix, producers, None)
        return
    for node in nodes_in_order(graph):
        first = next((producers[id(t)] for t in node.input_tensors if id(t) in producers), None)
        inside = list(_unit_or_inside(node.operation, prefix, producers, first))
        yield from inside
        if inside:
            producers.update((id(tensor), inside[-1].path) for tensor in node.outputs)


def _unit_or_inside(
    operation: Layer, prefix: str, producers: dict[int, str], first: str | None
) -> list[Unit]:
    path = prefix + operation.name
    if graph_of(operation) is not None:
        return list(_walk(operation, f"{path}/", producers))
    return [Unit(path, operation, first)]


def nodes_in_order(graph: types.Functional) -> list[Any]:
    """The calls of a Functional graph, each after those whose outputs it reads, without inputs."""
    by_depth = graph._nodes_by_depth
    return [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation and not node.is_input
    ]


def _check_complete(model: Model, units: list[Unit]) -> None:
    known = {id(variable) for unit in units for variable in unit.variables}
    own = [v.path for v in model.weights if id(v) not in known]
    if own:
        raise ConfigError(
            f"The model {model.name!r} has weights that are in none of its layers: "
            f"{', '.join(own[:5])}. Put them into a layer, so that they can be placed with it."
        )
