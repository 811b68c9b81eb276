"""Which layer is in which chunk of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.errors import ConfigError
from tfdist.placement.costs import costs_of
from tfdist.placement.device_map import devices_of
from tfdist.placement.partition import split
from tfdist.placement.plan import Plan
from tfdist.placement.units import Unit

__all__ = ["chunks_of"]


def chunks_of(
    model: Any,
    units: Sequence[Unit],
    inputs: Any,
    count: int,
    wanted: Sequence[str] | Mapping[str, int] | None,
) -> tuple[dict[str, int], str]:
    """The chunk of each layer.

    Args:
        model: a Functional or Sequential model that is built.
        units: its units.
        inputs: a microbatch, to measure with.
        count: the number of chunks.
        wanted: the paths of the layers that the second chunk and those after it begin with; or
            rules, as of a device map, with numbers of chunks; or None for chunks that take about as
            long as each other.

    Returns:
        Chunks by path, and a table of the plan where there was one.

    Raises:
        ConfigError: if the model cannot be cut so.
    """
    paths = [unit.path for unit in units]
    layers = [unit.path for unit in units if unit.is_layer]
    if count > len(layers):
        raise ConfigError(
            f"{count} stages are more than the model has layers to share out: {len(layers)} "
            f"({', '.join(layers)}). Give at most {len(layers)} stages."
        )
    if isinstance(wanted, Mapping):
        named = devices_of(list(units), {rule: str(chunk) for rule, chunk in wanted.items()})
        return {path: int(chunk) for path, chunk in named.items()}, ""
    if wanted is not None:
        return _beginning(paths, wanted, count), ""
    costs = costs_of(model, inputs)
    # What a chunk without a layer would have is left out: each begins with another one.
    cuts = split(costs, [float("inf")] * count, filled=True)
    assert cuts is not None
    found = {
        costs[i].path: number for number, (begin, end) in enumerate(cuts) for i in range(begin, end)
    }
    plan = Plan(devices={path: f"stage {number}" for path, number in found.items()}, costs=costs)
    return found, plan.table()


def _beginning(paths: Sequence[str], wanted: Sequence[str], count: int) -> dict[str, int]:
    if len(wanted) != count - 1:
        raise ConfigError(
            f"cuts={list(wanted)!r} names {len(wanted)} layers that stages begin with, and "
            f"{count} stages have {count - 1} borders. Name the first layer of each stage but the "
            "first."
        )
    places = []
    for name in wanted:
        if name not in paths:
            raise ConfigError(
                f"cuts={list(wanted)!r}: there is no layer {name!r} for a stage to begin with. "
                f"There are: {', '.join(paths)}."
            )
        places.append(paths.index(name))
    if places != sorted(places) or 0 in places:
        raise ConfigError(
            f"cuts={list(wanted)!r}: the stages' first layers are not in the order of the model: "
            f"{', '.join(paths)}."
        )
    return {path: sum(place <= i for place in places) for i, path in enumerate(paths)}
