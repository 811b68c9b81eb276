"""The options of the parameter server, and what conflicts with them."""

from __future__ import annotations

from typing import Any

from tfdist.errors import ConfigError
from tfdist.utils.validation import check_choice, check_number, check_range

__all__ = ["ON_STALE", "STEP_TIMEOUT", "WIRE_DTYPES", "check", "check_ranges"]

#: What happens to a gradient that would be staler than `staleness`.
ON_STALE: dict[str, str] = {
    "wait": "fast workers wait, so that none is",
    "drop": "it is discarded and counted",
    "damp": "each gradient's step is divided by its staleness; no bound",
}

#: Types in which floating-point tensors may cross the network.
WIRE_DTYPES = ("float32", "bfloat16", "float16")

#: Seconds that a worker may take for a step.
STEP_TIMEOUT = 600.0


def check(config: Any) -> None:
    """Checks the options of a `StrategyConfig` that belong to the parameter server.

    Raises:
        ConfigError: if one conflicts with another.
    """
    _check_staleness(config)
    _check_backup(config)


def check_ranges(config: Any) -> None:
    """Checks each option by itself.

    Raises:
        ConfigError: if a value is out of range.
    """
    check_number("ps", config.ps, 1, "There must be a parameter server to hold the weights.")
    if config.staleness is not None:
        check_number("staleness", config.staleness, 0, "It counts updates.")
    check_number("backup_workers", config.backup_workers, 0)
    check_number("min_shard_bytes", config.min_shard_bytes, 1)
    if config.max_shards is not None:
        check_number("max_shards", config.max_shards, 1, "1 splits no variable.")
    check_range("step_timeout", config.step_timeout, above=0, why="It is in seconds.")
    check_choice("on_stale", config.on_stale, ON_STALE)
    check_choice("wire_dtype", config.wire_dtype, WIRE_DTYPES)


def _check_staleness(config: Any) -> None:
    if config.mode == "stale" and config.staleness is None and config.on_stale != "damp":
        raise ConfigError(
            f"mode='stale' with on_stale={config.on_stale!r} needs a bound. Give staleness, the "
            "number of updates that may come between the read of the weights and their gradient's "
            "own, such as 4."
        )
    given = "staleness" if config.staleness is not None else "on_stale"
    if config.mode != "stale" and (config.staleness is not None or config.on_stale != "wait"):
        raise ConfigError(
            f"{given}={getattr(config, given)!r} conflicts with mode={config.mode!r}. Choose "
            f"mode='stale', or leave {given} out."
        )
    if config.on_stale == "damp" and config.staleness is not None:
        raise ConfigError(
            f"staleness={config.staleness} conflicts with on_stale='damp', which bounds no "
            "gradient but divides its step by its staleness. Leave staleness out, or choose "
            "on_stale='wait' or 'drop'."
        )


def _check_backup(config: Any) -> None:
    if not config.backup_workers:
        return
    if config.mode != "sync":
        raise ConfigError(
            f"backup_workers={config.backup_workers} conflicts with mode={config.mode!r}: only "
            "mode='sync' waits for several gradients before an update."
        )
    if config.backup_workers >= config.processes:
        raise ConfigError(
            f"backup_workers={config.backup_workers} leaves none of the {config.processes} "
            "workers' gradients for an update. Give fewer, or more workers (-n)."
        )
