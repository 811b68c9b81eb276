"""The parts of a model that can be placed, by path, and the rules that give each a device."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tfdist import types
from tfdist._keras import Functional
from tfdist.errors import ConfigError
from tfdist.types import Layer, Model

__all__ = ["Unit", "devices_of", "graph_of", "nodes_in_order", "units_of"]

_REGULAR = "re:"


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


def devices_of(units: Sequence[Unit], device_map: Mapping[str, str]) -> dict[str, str]:
    """The device of each unit.

    A rule names a layer by its path, a model with all that is in it by the model's, several layers
    by a glob (`block_*`), or by a regular expression after `re:`, which must match a whole path.
    The most exact rule counts: a path before the path of a model around it, that before a pattern.
    Operations that are not layers go with the layer whose output they read first, unless a rule
    names them.

    Args:
        units: the units of a model, in their order.
        device_map: for each rule a device.

    Returns:
        Devices by path.

    Raises:
        ConfigError: if a layer has no rule or two with different devices, or if a rule names
            no layer.
    """
    used: set[str] = set()
    result: dict[str, str] = {}
    missing: list[str] = []
    for unit in units:
        rules = _rules_for(unit.path, device_map)
        used.update(rules)
        devices = {device_map[rule] for rule in rules}
        if len(devices) > 1:
            choices = ", ".join(f"{rule!r}: {device_map[rule]!r}" for rule in rules)
            raise ConfigError(
                f"The device map says more than one device for the layer {unit.path!r}: {choices}. "
                f"Add a rule for {unit.path!r} alone, or make the patterns narrower."
            )
        if devices:
            result[unit.path] = devices.pop()
        elif unit.is_layer:
            missing.append(unit.path)
        else:
            result[unit.path] = result.get(unit.follows or "", "")
    _check_all_used(units, device_map, used)
    if missing:
        named = ", ".join(sorted(set(device_map.values()))) or "none"
        raise ConfigError(
            f"The device map has no rule for: {_listed(missing)}. Give each a device (the map uses "
            f"{named}), or add the rule '*' for the rest."
        )
    first = next(iter(result.values()), "")
    return {path: device or first for path, device in result.items()}


def _rules_for(path: str, device_map: Mapping[str, str]) -> list[str]:
    """The rules that count for a path: several only if patterns match alike."""
    parts = path.split("/")
    for length in range(len(parts), 0, -1):
        around = "/".join(parts[:length])
        if around in device_map:
            return [around]
    return [rule for rule in device_map if _matches(rule, path)]


def _matches(rule: str, path: str) -> bool:
    if not rule.startswith(_REGULAR):
        return fnmatch.fnmatchcase(path, rule)
    try:
        return re.fullmatch(rule.removeprefix(_REGULAR), path) is not None
    except re.error as error:
        raise ConfigError(f"The device map's rule {rule!r} is no regular expression: {error}.")  # noqa: B904


def _check_all_used(units: Sequence[Unit], device_map: Mapping[str, str], used: set[str]) -> None:
    for rule in device_map:
        if rule in used or any(_matches(rule, unit.path) for unit in units):
            continue
        paths = [unit.path for unit in units]
        close = difflib.get_close_matches(rule, paths, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"The device map's rule {rule!r} names no layer.{hint} There are: {_listed(paths)}."
        )


def _listed(names: Sequence[str]) -> str:
    most = 20
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + rest
