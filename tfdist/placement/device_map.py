"""From rules to devices: which layer goes where."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence

from tfdist.errors import ConfigError
from tfdist.placement.units import Unit

__all__ = ["devices_of"]

_REGULAR = "re:"


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
        raise ConfigError(_unmatched(missing, device_map))
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


def _unmatched(missing: list[str], device_map: Mapping[str, str]) -> str:
    devices = ", ".join(sorted(set(device_map.values()))) or "none"
    return (
        f"The device map has no rule for: {_listed(missing)}. Give each a device (the map uses "
        f"{devices}), or add the rule '*' for the rest."
    )


def _listed(names: Sequence[str], most: int = 20) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + rest
