"""Splitting a row of layers over devices, such that the slowest device is fastest."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tfdist.errors import ConfigError
from tfdist.placement.costs import Cost

__all__ = ["split", "split_with_overflow"]

#: By how much a layer that overflows to the host is assumed to be slower there.
_SLOWER_ON_HOST = 10.0

Cuts = tuple[tuple[int, int], ...]


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
    seconds = _sums([cost.seconds for cost in costs])
    memory = _sums([float(cost.memory) for cost in costs])
    count = len(costs)

    @functools.cache
    def best(begin: int, device: int) -> tuple[float, float, Cuts] | None:
        """The slowest time and the most unequal one of layers from `begin`, and their parts."""
        if device == len(budgets):
            return (0.0, 0.0, ()) if begin == count else None
        found: tuple[float, float, Cuts] | None = None
        for end in range(begin + filled, count + 1):
            if memory[end] - memory[begin] > budgets[device]:
                break
            rest = best(end, device + 1)
            if rest is None:
                continue
            own = (seconds[end] - seconds[begin]) * factors[device]
            # Squares decide between equal maxima, for even parts also if one layer rules.
            candidate = (max(own, rest[0]), own**2 + rest[1], ((begin, end), *rest[2]))
            if found is None or candidate[:2] < found[:2]:
                found = candidate
        return found

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
    _check_each(costs, devices, budgets, overflow)
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


def _check_each(
    costs: Sequence[Cost], devices: Sequence[str], budgets: Sequence[float], overflow: str | None
) -> None:
    if overflow is not None:
        return
    for cost in costs:
        if cost.memory > max(budgets):
            roomy = devices[list(budgets).index(max(budgets))]
            raise ConfigError(
                f"The layer {cost.path!r} needs {_mib(cost.memory)} in training, which is more "
                f"than any device has: {roomy} has {_mib(max(budgets))}. Make the layer or the "
                "batch smaller, or give overflow='cpu'."
            )


def _sums(values: Sequence[float]) -> list[float]:
    result = [0.0]
    for value in values:
        result.append(result[-1] + value)
    return result


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
