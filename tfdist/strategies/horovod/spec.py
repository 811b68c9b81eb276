"""The description of the strategy `horovod` for the rest of tfdist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdist.cluster.spec import Topology
from tfdist.config.gradient_options import GradientOptions
from tfdist.config.horovod_options import HorovodOptions
from tfdist.config.sharding_options import (
    MeshOptions,
    ShardingOptions,
    check_mesh,
    describe_mesh,
)
from tfdist.config.strategy_spec import StrategySpec
from tfdist.config.timeline_options import is_picture
from tfdist.errors import ConfigError

if TYPE_CHECKING:
    from tfdist.config.strategy_config import StrategyConfig

__all__ = ["SPEC"]


def _check(config: StrategyConfig) -> None:
    if (config.devices or 1) > 1:
        raise ConfigError(
            f"devices={config.devices} conflicts with strategy='horovod', which has one process "
            "for each device. Leave devices out: -n counts the processes."
        )
    check_mesh(config)
    gradients, own = config.part(GradientOptions), config.part(HorovodOptions)
    if own.timeline is not None and is_picture(own.timeline):
        raise ConfigError(
            f"timeline={own.timeline!r} asks for a picture, which strategy='horovod' does not "
            "draw: Horovod writes JSON for chrome://tracing. Give a name that ends in .json."
        )
    if gradients.bucket_mb is not None and own.groups is not None:
        raise ConfigError(
            f"bucket_mb={gradients.bucket_mb:g} conflicts with groups={own.groups}: both say how "
            "gradients are divided. Leave one of them out."
        )
    if own.reduction == "adasum":
        _check_adasum(config)


def _check_adasum(config: StrategyConfig) -> None:
    processes, gradients = config.processes, config.part(GradientOptions)
    zero, mesh = config.part(ShardingOptions).zero, config.part(MeshOptions).mesh
    if zero > 1:
        raise ConfigError(
            f"zero={zero} conflicts with reduction='adasum', which combines whole gradients. "
            "Choose zero=1 or reduction='mean'."
        )
    if mesh is not None:
        raise ConfigError(
            f"mesh={mesh!r} conflicts with reduction='adasum', which combines the gradients of "
            "whole models. Leave mesh out, or choose reduction='mean'."
        )
    if gradients.mode != "sync":
        raise ConfigError(
            f"mode={gradients.mode!r} conflicts with reduction='adasum', which combines the "
            "gradients of one step. Choose reduction='mean' or mode='sync'."
        )
    if processes & (processes - 1):
        raise ConfigError(
            f"reduction='adasum' combines gradients in pairs, and processes={processes} is no "
            "power of two. Start 2, 4, 8, ... processes, or choose reduction='mean'."
        )
    if gradients.compression != "none":
        raise ConfigError(
            f"compression={gradients.compression!r} conflicts with reduction='adasum'. Leave one "
            "of them out."
        )


SPEC = StrategySpec(
    name="horovod",
    summary="several processes, by Horovod's ring all-reduce",
    create="tfdist.strategies.horovod.strategy:create",
    topology=Topology.WORKERS,
    modes=("sync", "stale", "local"),
    options=(GradientOptions, ShardingOptions, MeshOptions, HorovodOptions),
    check=_check,
    describe=describe_mesh,
    exchanges_gradients=True,
    one_device=True,
    verified_by="processes",
    problem="tfdist.strategies.horovod.library:problem",
    started_elsewhere="tfdist.strategies.horovod.rendezvous:started_by_horovodrun",
)
