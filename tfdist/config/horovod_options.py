"""The options of Horovod, what conflicts with them, and the variables that Horovod reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.errors import ConfigError
from tfdist.utils.validation import (
    LONGEST_SECONDS,
    check_choice,
    check_number,
    check_range,
)

__all__ = ["REDUCTIONS", "check", "check_ranges", "variables"]

#: How the replicas' gradients become one.
REDUCTIONS: dict[str, str] = {
    "mean": "their mean over the examples",
    "adasum": "Adasum (arXiv:2006.02924), which adds orthogonal gradients and averages parallel "
    "ones; 2, 4, 8, ... processes",
}

#: Seconds that a tensor may wait for a rank, unless an option says it.
STALL_TIMEOUT = 600.0

#: Milliseconds between two looks of Horovod's thread for tensors that are ready. Horovod's own 1 ms
#: is most of what a small all-reduce costs; see docs/horovod.md.
DEFAULT_CYCLE_MS = 0.3

#: Seconds after which Horovod names the ranks that a tensor waits for.
_STALL_WARNING = 60


def check_ranges(config: Any) -> None:
    """Checks each option by itself.

    Raises:
        ConfigError: if a value is out of range.
    """
    check_choice("reduction", config.reduction, REDUCTIONS)
    if config.fusion_mb is not None:
        check_range("fusion_mb", config.fusion_mb, least=0, most=2**20, why="It is in MiB.")
    if config.cycle_ms is not None:
        check_range("cycle_ms", config.cycle_ms, least=0)
    check_range("stall_timeout", config.stall_timeout, least=0, most=LONGEST_SECONDS)
    if config.groups is not None:
        check_number("groups", config.groups, 1)


def variables(config: Any) -> Mapping[str, str]:
    """The environment variables by which Horovod is told of the options.

    Args:
        config: a `StrategyConfig` of strategy `horovod`.

    Returns:
        Those that an option gives, by name.
    """
    given: dict[str, str] = {}
    if config.fusion_mb is not None:
        given["HOROVOD_FUSION_THRESHOLD"] = str(int(config.fusion_mb * 2**20))
    if config.cycle_ms is not None:
        given["HOROVOD_CYCLE_TIME"] = str(config.cycle_ms)
    if config.hierarchical:
        given["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "1"
    if config.autotune:
        given["HOROVOD_AUTOTUNE"] = "1"
    if config.timeline is not None:
        given["HOROVOD_TIMELINE"] = str(config.timeline)
    if config.stall_timeout != STALL_TIMEOUT:
        given.update(_stall(config.stall_timeout))
    return given


def defaults() -> Mapping[str, str]:
    """What tfdist sets where neither an option nor the user's environment does."""
    return {
        "HOROVOD_CYCLE_TIME": str(DEFAULT_CYCLE_MS),
        **_stall(STALL_TIMEOUT),
    }


def _stall(seconds: float) -> dict[str, str]:
    """Horovod shuts down only at times after its warning, and 0 means never."""
    whole = max(2, round(seconds))
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(min(_STALL_WARNING, whole // 2)),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(whole),
    }


def check(config: Any) -> None:
    """Checks the options of a `StrategyConfig` that belong to Horovod.

    Raises:
        ConfigError: if one conflicts with another.
    """
    if config.reduction == "adasum" and config.processes & (config.processes - 1):
        raise ConfigError(
            f"reduction='adasum' combines gradients in pairs, and processes={config.processes} is "
            "no power of two. Start 2, 4, 8, ... processes, or choose reduction='mean'."
        )
    if config.reduction == "adasum" and config.compression != "none":
        raise ConfigError(
            f"compression={config.compression!r} conflicts with reduction='adasum'. Leave one of "
            "them out."
        )
