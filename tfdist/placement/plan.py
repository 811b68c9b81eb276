"""A plan of which device holds which layer: made of costs, shown as a table, kept in a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from tfdist.config.strategy_file import read_toml
from tfdist.errors import ConfigError
from tfdist.placement.costs import Cost, costs_of
from tfdist.placement.partition import split_with_overflow
from tfdist.types import Model, Structure
from tfdist.utils.atomic_io import replacing

__all__ = ["Plan", "plan_placement", "read_device_map"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The assignment of layers to devices, and its reason.

    Attributes:
        devices: the device of each layer, by path, in their order.
        costs: the cost of each layer.
    """

    devices: Mapping[str, str]
    costs: Sequence[Cost]

    def table(self) -> str:
        """Lines for a terminal: a row for each layer, and the sums of each device."""
        header = ("layer", "device", "ms", "parameters", "weights", "activations")
        rows: list[tuple[str, ...]] = [header]
        for cost in self.costs:
            rows.append(_row(cost.path, self.devices[cost.path], [cost]))
        for device in dict.fromkeys(self.devices.values()):
            own = [cost for cost in self.costs if self.devices[cost.path] == device]
            rows.append(_row(f"= {len(own)} layer{'s' if len(own) != 1 else ''}", device, own))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = []
        for row in rows:
            words = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
            numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join([*words, *numbers]).rstrip())
        return "\n".join(lines)

    def write(self, path: Path | str) -> None:
        """Writes the device map as the table [device_map] of a TOML file, which `place` reads."""
        pairs = self.devices.items()
        lines = [f"{json.dumps(name)} = {json.dumps(device)}" for name, device in pairs]
        with replacing(str(path)) as part:
            Path(part).write_text("\n".join(["[device_map]", *lines, ""]))


def plan_placement(
    model: Model,
    batch: Structure = None,
    devices: Sequence[str] | Mapping[str, float] | None = None,
    *,
    overflow: str | None = None,
    slots: int = 2,
) -> Plan:
    """Plans a placement: contiguous layers, so that the slowest device is fastest.

    Args:
        model: a Keras model that is built.
        batch: inputs of the size that a step of training has, or the number of examples; 32 by
            default.
        devices: names, or names with the bytes that each may use. By default all GPUs, or all
            logical CPU devices, of this process.
        overflow: a device for layers that do not fit the others, such as `"cpu"`.
        slots: values that the optimizer keeps for each weight.

    Raises:
        ConfigError: if a layer or the model does not fit.
    """
    budgets = _budgets(devices)
    inputs = _zeros(model, batch or 32) if batch is None or isinstance(batch, int) else batch
    costs = costs_of(model, inputs, slots=slots)
    names = split_with_overflow(costs, list(budgets), list(budgets.values()), overflow)
    chosen = {cost.path: name for cost, name in zip(costs, names, strict=True)}
    return Plan(devices=chosen, costs=costs)


def read_device_map(path: Path | str) -> dict[str, str]:
    """Reads the device map of a strategy file.

    Raises:
        ConfigError: if the file cannot be read or has none.
    """
    result = read_toml(Path(path)).get("device_map")
    if not isinstance(result, dict) or not all(isinstance(each, str) for each in result.values()):
        raise ConfigError(
            f"The file {str(path)!r} has no table [device_map] of layers and devices, as "
            "Plan.write writes it."
        )
    return result


def _zeros(model: Model, examples: int) -> Structure:
    """Inputs of zeros for a model that knows its inputs' shapes."""
    inputs = getattr(model, "_inputs_struct", None) or getattr(model, "inputs", None)
    if inputs is None or any(None in x.shape[1:] for x in keras.tree.flatten(inputs)):
        raise ConfigError(
            f"The inputs of the model {model.name!r} have no known shape. Give `batch`, inputs of "
            "the size that a step of training has."
        )
    if isinstance(inputs, list) and len(inputs) == 1:
        inputs = inputs[0]
    return keras.tree.map_structure(lambda x: tf.zeros((examples, *x.shape[1:]), x.dtype), inputs)


def _budgets(devices: Sequence[str] | Mapping[str, float] | None) -> dict[str, float]:
    if isinstance(devices, Mapping):
        return {name: float(size) for name, size in devices.items()}
    if devices is None:
        result = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        devices = [device.name.removeprefix("/device:") for device in result]
    if not devices:
        raise ConfigError("devices=[] leaves no device to plan for. Name at least one.")
    return dict.fromkeys(devices, float("inf"))


def _row(name: str, device: str, costs: Sequence[Cost]) -> tuple[str, ...]:
    return (
        name,
        device,
        f"{1e3 * sum(cost.seconds for cost in costs):.2f}",
        f"{sum(cost.parameters for cost in costs):,}",
        f"{sum(cost.weight_bytes for cost in costs) / 2**20:.2f} MiB",
        f"{sum(cost.activation_bytes for cost in costs) / 2**20:.2f} MiB",
    )
