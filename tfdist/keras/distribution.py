"""Keras's own API of meshes and layouts, on the processes of a strategy.

`keras.distribution` divides models on JAX; on TensorFlow Keras ignores what it is given
(keras#18473). In a strategy's scope its devices are the processes, its batch axis is the data axis
of their mesh and another one the model axis, and a `LayoutMap` is their layouts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import distribution_backend, distribution_lib, global_state
from tfdist.comm.host_collectives import worker_count
from tfdist.config.mesh import DATA, MODEL, LayoutRule, Mesh
from tfdist.errors import ConfigError
from tfdist.keras.hooks import Hook
from tfdist.types import Strategy, Structure

__all__ = ["hooks"]


def hooks() -> list[Hook]:
    """The seams at which Keras lists devices, and takes a distribution."""
    return [
        Hook(distribution_backend, "list_devices", _processes),
        Hook(distribution_lib, "distribute_tensor", _as_computed),
        Hook(keras.distribution, "distribute_tensor", _as_computed),
        Hook(keras.distribution, "get_device_count", _counted),
        Hook(keras.distribution, "initialize", _connected),
        Hook(global_state, "set_global_attribute", _laid_out),
    ]


def _processes(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The devices of a job are those of all its processes, of which TensorFlow lists its own."""

    @functools.wraps(original)
    def list_devices(device_type: str | None = None) -> list[str]:
        strategy = tf.distribute.get_strategy()
        if worker_count(strategy) == 1:
            return original(device_type)
        kind = "gpu" if "GPU" in strategy.extended.worker_devices[0] else "cpu"
        if device_type is not None and device_type.lower() != kind:
            return original(device_type)
        count = strategy.world.workers * strategy.world.local
        return [f"{kind}:{number}" for number in range(count)]

    return list_devices


def _as_computed(original: Callable[..., Any]) -> Callable[..., Any]:
    """TensorFlow's backend lacks the function; a layout of outputs changes none of their values."""

    @functools.wraps(original)
    def distribute_tensor(tensor: Structure, layout: object) -> Structure:
        del layout
        return tensor

    return distribute_tensor


def _counted(original: Callable[..., int]) -> Callable[..., int]:
    """TensorFlow's backend lacks the function."""

    @functools.wraps(original)
    def get_device_count(device_type: str | None = None) -> int:
        return len(keras.distribution.list_devices(device_type))

    return get_device_count


def _connected(original: Callable[..., None]) -> Callable[..., None]:
    """TensorFlow's backend lacks the function; the processes of a strategy have met already."""

    @functools.wraps(original)
    def initialize(*args: object, **kwargs: object) -> None:
        del args, kwargs

    return initialize


def _laid_out(original: Callable[..., None]) -> Callable[..., None]:
    """Keras keeps a distribution and, on TensorFlow, does nothing with it."""

    @functools.wraps(original)
    def set_global_attribute(name: str, value: object) -> None:
        if name == distribution_lib.GLOBAL_ATTRIBUTE_NAME:
            strategy = tf.distribute.get_strategy()
            if value is not None:
                _lay_out(strategy, value)
            elif getattr(strategy, "mesh", None) is not None:
                strategy.layouts = strategy.default_layouts
        original(name, value)

    return set_global_attribute


def _lay_out(strategy: Strategy, distribution: Any) -> None:
    """Arranges a strategy's processes as a distribution of Keras asks for.

    Raises:
        ConfigError: if they cannot be arranged so.
    """
    if not distribution.auto_shard_dataset and worker_count(strategy) > 1:
        raise ConfigError(
            "auto_shard_dataset=False of keras.distribution is not supported: tfdist slices the "
            "global batches. Leave it out; or give a data set the auto-shard policy OFF, by which "
            "each process reads its own part, without a model axis."
        )
    mesh = distribution.device_mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    names = _names(sizes, distribution.batch_dim_name)
    axes = tuple((names[each], size) for each, size in sizes.items() if each in names)
    rules: Collection[LayoutRule] = ()
    if isinstance(distribution, keras.distribution.ModelParallel):
        rules = _Rules(distribution._layout_map, names)
    strategy.lay_out(Mesh(axes), rules)


def _names(sizes: Mapping[str, int], batch: str) -> dict[str, str]:
    """The axes of tfdist that those of Keras are; others have one device."""
    others = [each for each in sizes if each != batch]
    large = [each for each in others if sizes[each] > 1]
    if len(large) > 1:
        raise ConfigError(
            f"The device mesh {dict(sizes)} of keras.distribution has {len(large)} axes beside "
            f"{batch!r}. tfdist has one model axis: give the others the size 1."
        )
    model = (large or others)[:1]
    return {batch: DATA, **dict.fromkeys(model, MODEL)}


class _Rules(Collection[LayoutRule]):
    """The rules of a `LayoutMap`, to which the program may add until a weight is made.

    Args:
        layout_map: the map.
        names: the axes of tfdist that those of Keras are.
    """

    def __init__(self, layout_map: Any, names: Mapping[str, str]) -> None:
        self._map, self._names = layout_map, names

    def __len__(self) -> int:
        return len(self._map)

    def __iter__(self) -> Iterator[LayoutRule]:
        return (_rule(each, self._map[each].axes, self._names) for each in self._map)

    def __contains__(self, rule: object) -> bool:
        return any(each == rule for each in self)


def _rule(pattern: str, axes: tuple[str | None, ...], names: Mapping[str, str]) -> LayoutRule:
    """A rule of a `LayoutMap`, whose patterns match whole paths, or nothing at all."""
    exact = rf"^(?:{pattern}|{re.escape(pattern)})$"
    divided = tuple(names.get(each or "") for each in axes)
    return LayoutRule(exact, divided, required=False, key=pattern)
