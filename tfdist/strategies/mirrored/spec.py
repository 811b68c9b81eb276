"""The description of the strategy `mirrored` for the rest of tfdist."""

from __future__ import annotations

from tfdist.config.strategy_spec import StrategySpec

__all__ = ["SPEC"]

SPEC = StrategySpec(
    name="mirrored",
    summary="the GPUs, or logical CPU devices, of one process",
    create="tfdist.strategies.mirrored.strategy:create",
    modes=("sync", "stale", "local"),
    exchanges_gradients=True,
    processes_are_devices=True,
    verified_by="devices",
)
