"""The options of the parameter server, and what conflicts with them."""

from __future__ import annotations

from typing import Any

from tfdist.errors import ConfigError

__all__ = ["ON_STALE", "WIRE_DTYPES", "check"]

#: What happens to a gradient that would be staler than `staleness`.
ON_STALE: dict[str, str] = {
    "wait": "fast workers wait, so that none is",
    "drop": "it is discarded and counted",
    "damp": "each gradient's step is divided by its staleness; no bound",
}

#: Types in which floating-point tensors may cross the network.
WIRE_DTYPES = ("float32", "bfloat16", "float16")

#: Options that only `parameter_server` has, with the values that they have elsewhere.
_DEFAULTS: dict[str, Any] = {
    "ps": 1,
    "staleness": None,
    "on_stale": "wait",
    "backup_workers": 0,
    "wire_dtype": "float32",
    "min_shard_bytes": 1 << 20,
    "max_shards": None,
}


def check(config: Any) -> None:
    """Checks the options of a `StrategyConfig` that belong to the parameter server.

    Raises:
        ConfigError: if a value is out of range or conflicts with another.
    """
    _check_ranges(config)
    if config.strategy not in ("parameter_server", "auto"):
        _check_unused(config)
        return
    if (config.devices or 1) > 1:
        raise ConfigError(
            f"devices={config.devices} conflicts with strategy='parameter_server', whose workers "
            "train on one device each. Start a worker for each device: -n counts them."
        )
    _check_staleness(config)
    _check_backup(config)


def _check_ranges(config: Any) -> None:
    _check_number("ps", config.ps, 1, "There must be a parameter server to hold the weights.")
    if config.staleness is not None:
        _check_number("staleness", config.staleness, 0, "It counts updates.")
    _check_number("backup_workers", config.backup_workers, 0, "")
    _check_number("min_shard_bytes", config.min_shard_bytes, 1, "")
    if config.max_shards is not None:
        _check_number("max_shards", config.max_shards, 1, "1 splits no variable.")
    for name, value, choices in (
        ("on_stale", config.on_stale, tuple(ON_STALE)),
        ("wire_dtype", config.wire_dtype, WIRE_DTYPES),
    ):
        if value not in choices:
            raise ConfigError(f"Unknown {name} {value!r}. There are: {', '.join(choices)}.")


def _check_unused(config: Any) -> None:
    for name, default in _DEFAULTS.items():
        value = getattr(config, name)
        if value != default:
            raise ConfigError(
                f"{name}={value!r} conflicts with strategy={config.strategy!r}, which has no "
                f"parameter servers. Choose strategy='parameter_server', or leave {name} out."
            )


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


def _check_number(name: str, value: object, least: int, why: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        text = f"{name}={value!r} is not a whole number of {least} or more. {why}"
        raise ConfigError(text.rstrip())
