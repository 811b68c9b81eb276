"""What the rest of tfdist knows of the strategy `parameter_server`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.cluster.spec import Topology
from tfdist.config import gradient_options, server_options
from tfdist.config.server_options import ON_STALE
from tfdist.config.strategy_spec import Refusal, StrategySpec
from tfdist.errors import ConfigError

__all__ = ["SPEC"]


def _check(config: Any) -> None:
    if (config.devices or 1) > 1:
        raise ConfigError(
            f"devices={config.devices} conflicts with strategy='parameter_server', whose workers "
            "train on one device each. Start a worker for each device: -n counts them."
        )
    server_options.check(config)


def _describe(config: Any) -> Mapping[str, str]:
    return {"update mode": _mode(config), "weights": _weights(config)}


def _mode(config: Any) -> str:
    """The update mode with its options, in words."""
    if config.mode == "stale" and config.on_stale == "damp":
        return f"stale ({ON_STALE['damp']})"
    if config.mode == "stale":
        return (
            f"stale (no gradient is applied after more than {config.staleness} other updates: "
            f"{ON_STALE[config.on_stale]})"
        )
    if config.mode == "async":
        return "async (each worker's gradient is an update of its own)"
    if config.backup_workers:
        enough = config.processes - config.backup_workers
        return f"sync (an update takes the first {enough} of {config.processes} gradients)"
    return str(config.mode)


def _weights(config: Any) -> str:
    """Where the weights are and how they travel, in words."""
    most = config.ps if config.max_shards is None else config.max_shards
    parts = f"on {config.ps} parameter server{'s' if config.ps > 1 else ''}"
    if config.ps > 1 and most > 1:
        least = config.min_shard_bytes
        size = f"{least / (1 << 20):g} MiB" if least >= 1 << 20 else f"{least} bytes"
        parts += f", large ones in up to {most} parts of at least {size}"
    if config.wire_dtype != "float32":
        parts += f", sent as {config.wire_dtype}"
    return parts


SPEC = StrategySpec(
    name="parameter_server",
    summary="workers that compute and servers that hold the weights",
    create="tfdist.strategies.parameter_server.start:create",
    topology=Topology.SERVERS,
    modes=("sync", "async", "stale"),
    own_options=(
        *("ps", "backup_workers", "wire_dtype"),
        *("min_shard_bytes", "max_shards", "step_timeout"),
    ),
    lacking=", which has no parameter servers.",
    refuses=(
        gradient_options.NO_EXCHANGE,
        Refusal(
            names=gradient_options.ON_ONE_REPLICA,
            instead="multi_worker",
            why=": its servers apply gradients. Keras's own gradient_accumulation_steps works "
            "there.",
        ),
    ),
    check=_check,
    one_device=True,
    describe=_describe,
)
