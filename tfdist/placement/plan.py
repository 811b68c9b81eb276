"""Plans of the device of each layer: measured costs, their best split, a table and a file."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.config.strategy_file import read_toml
from tfdist.errors import ConfigError
from tfdist.placement.units import Unit, units_of
from tfdist.types import KerasVariable, Model, Structure
from tfdist.utils.atomic_io import replacing

__all__ = [
    "Cost",
    "Plan",
    "costs_of",
    "plan_placement",
    "read_device_map",
    "split",
    "split_with_overflow",
]

#: A backward pass computes about as much again for the inputs and for the weights.
_FORWARD_AND_BACKWARD = 3.0
_REPEATS = 3

#: By how much a layer that overflows to the host is assumed to be slower there.
_SLOWER_ON_HOST = 10.0

Cuts = tuple[tuple[int, int], ...]


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
    timed. The activations that a layer keeps are estimated by the size of its output. Variables
    that layers assign, such as those of their metrics, are left as they were.

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
    with _watched(units, times, sizes), keras.StatelessScope(), _kept_variables(model):
        for _ in range(_REPEATS + 1):
            model(inputs, training=False)
    return [
        _cost_of(unit, times[id(unit.operation)], sizes.get(id(unit.operation), 0), slots)
        for unit in units
    ]


@contextlib.contextmanager
def _kept_variables(model: Model) -> Iterator[None]:
    """Sets the variables of TensorFlow's own that layers have back to what they were."""
    own = [v for layer in model._flatten_layers() for v in vars(layer).values()]
    before = [(v, v.read_value()) for v in own if isinstance(v, tf.Variable)]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def _cost_of(unit: Unit, times: Sequence[float], size: int, slots: int) -> Cost:
    weights = unit.operation.weights if unit.is_layer else []
    trainable = [v for v in unit.operation.variables if v.trainable] if unit.is_layer else []
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


def split(
    costs: Sequence[Cost],
    budgets: Sequence[float],
    *,
    slower: Sequence[float] | None = None,
    filled: bool = False,
) -> Cuts | None:
    """The best contiguous parts, one a device, in the order of the devices.

    Dynamic programming over where each part begins, as for a pipeline's stages in PipeDream
    (arXiv:1806.03377, section 3.1), here with a memory budget for each device.

    Args:
        costs: the layers' costs, in their order.
        budgets: bytes that each device has.
        slower: for each device by what factor it is slower.
        filled: whether each device must have a layer.

    Returns:
        The beginning and end of each device's part, which may be empty; None if no split fits.
    """
    factors = list(slower or [1.0] * len(budgets))
    seconds = list(itertools.accumulate((cost.seconds for cost in costs), initial=0.0))
    memory = list(itertools.accumulate((cost.memory for cost in costs), initial=0))
    count = len(costs)

    @functools.cache
    def best(begin: int, device: int) -> tuple[float, float, Cuts] | None:
        """The slowest time and the most unequal one of layers from `begin`, and their parts."""
        if device == len(budgets):
            return (0.0, 0.0, ()) if begin == count else None
        best_cut: tuple[float, float, Cuts] | None = None
        for end in range(begin + filled, count + 1):
            if memory[end] - memory[begin] > budgets[device]:
                break
            rest = best(end, device + 1)
            if rest is None:
                continue
            own = (seconds[end] - seconds[begin]) * factors[device]
            # Squares decide between equal maxima, for even parts also if one layer rules.
            candidate = (max(own, rest[0]), own**2 + rest[1], ((begin, end), *rest[2]))
            if best_cut is None or candidate[:2] < best_cut[:2]:
                best_cut = candidate
        return best_cut

    result = best(0, 0)
    best.cache_clear()
    return None if result is None else result[2]


def split_with_overflow(
    costs: Sequence[Cost], devices: Sequence[str], budgets: Sequence[float], overflow: str | None
) -> list[str]:
    """The device of each layer; what fits on none of them goes to the overflow device.

    Args:
        costs: the layers' costs, in their order.
        devices: names of devices.
        budgets: bytes that each has.
        overflow: a device with memory enough for the rest, such as the host; None for no such.

    Raises:
        ConfigError: if a layer fits on no device, or all together do not.
    """
    most = max(budgets, default=0.0)
    large = next((cost for cost in costs if cost.memory > most), None)
    if overflow is None and large is not None:
        roomy = devices[list(budgets).index(most)]
        raise ConfigError(
            f"The layer {large.path!r} needs {_mib(large.memory)} in training, which is more than "
            f"any device has: {roomy} has {_mib(most)}. Make the layer or the batch smaller, or "
            "give overflow='cpu'."
        )
    cuts = split(costs, budgets)
    names = list(devices)
    if cuts is None and overflow is not None:
        names = [*devices, overflow]
        factors = [*(1.0 for _ in devices), _SLOWER_ON_HOST]
        cuts = split(costs, [*budgets, float("inf")], slower=factors)
    if cuts is None:
        need, have = sum(cost.memory for cost in costs), sum(budgets)
        raise ConfigError(
            f"The model needs {_mib(need)} for weights, gradients, the optimizer's state and "
            f"activations, and no contiguous split of its {len(costs)} layers fits "
            f"{len(devices)} device{'s' if len(devices) != 1 else ''} of {_mib(have)} in all. Give "
            "more devices or memory, a smaller batch, or overflow='cpu'."
        )
    return [name for name, (begin, end) in zip(names, cuts, strict=True) for _ in range(begin, end)]


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


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
    if devices is None:
        result = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        devices = [device.name.removeprefix("/device:") for device in result]
    if not devices:
        raise ConfigError(f"devices={devices!r} leaves no device to plan for. Name at least one.")
    if isinstance(devices, Mapping):
        return {name: float(size) for name, size in devices.items()}
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
