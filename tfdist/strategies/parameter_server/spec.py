"""The description of the strategy `parameter_server` for the rest of tfdist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tfdist.cluster.spec import Topology
from tfdist.config.server_options import ServerOptions
from tfdist.config.strategy_spec import NO_EXCHANGE, Refusal, StrategySpec
from tfdist.config.update_options import ON_STALE
from tfdist.errors import ConfigError

if TYPE_CHECKING:
    from tfdist.config.strategy_config import StrategyConfig

__all__ = ["SPEC"]


def _check(config: StrategyConfig) -> None:
    if (config.devices or 1) > 1:
        raise ConfigError(
            f"devices={config.devices} conflicts with strategy='parameter_server', whose workers "
            "train on one device each. Start a worker for each device: -n counts them."
        )
    backup = config.part(ServerOptions).backup_workers
    if backup >= config.processes:
        raise ConfigError(
            f"backup_workers={backup} leaves none of the {config.processes} workers' gradients for "
            "an update. Give fewer, or more workers (-n)."
        )


def _describe(config: StrategyConfig) -> Mapping[str, str]:
    own = config.part(ServerOptions)
    return {"update mode": _mode(own, config.processes), "weights": _weights(own)}


def _mode(own: ServerOptions, workers: int) -> str:
    """The update mode with its options, in words."""
    if own.mode == "stale" and own.on_stale == "damp":
        return f"stale ({ON_STALE['damp']})"
    if own.mode == "stale":
        return (
            f"stale (no gradient is applied after more than {own.staleness} other updates: "
            f"{ON_STALE[own.on_stale]})"
        )
    if own.mode == "async":
        return "async (each worker's gradient is an update of its own)"
    if own.backup_workers:
        enough = workers - own.backup_workers
        return f"sync (an update takes the first {enough} of {workers} gradients)"
    return own.mode


def _weights(own: ServerOptions) -> str:
    """The places of the weights and the way they travel, in words."""
    most = own.ps if own.max_shards is None else own.max_shards
    parts = f"on {own.ps} parameter server{'s' if own.ps > 1 else ''}"
    if own.ps > 1 and most > 1:
        least = own.min_shard_bytes
        size = f"{least / (1 << 20):g} MiB" if least >= 1 << 20 else f"{least} bytes"
        parts += f", large ones in up to {most} parts of at least {size}"
    if own.wire_dtype != "float32":
        parts += f", sent as {own.wire_dtype}"
    return parts


SPEC = StrategySpec(
    name="parameter_server",
    summary="workers that compute and servers that hold the weights",
    create="tfdist.strategies.parameter_server.strategy:create",
    topology=Topology.SERVERS,
    modes=("sync", "async", "stale"),
    options=(ServerOptions,),
    refuses=(
        NO_EXCHANGE,
        Refusal(
            names=("accumulate", "lr_rule", "base_batch", "lr_warmup", "report"),
            instead="multi_worker",
            why=": its servers apply gradients. Keras's own gradient_accumulation_steps works "
            "there.",
        ),
    ),
    check=_check,
    one_device=True,
    describe=_describe,
)
