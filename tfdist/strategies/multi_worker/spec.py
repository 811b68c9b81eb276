"""The description of the strategy `multi_worker` for the rest of tfdist."""

from __future__ import annotations

from tfdist.cluster.spec import Topology
from tfdist.config.collective_options import CollectiveOptions
from tfdist.config.gradient_options import GradientOptions
from tfdist.config.sharding_options import (
    MeshOptions,
    ShardingOptions,
    check_mesh,
    describe_mesh,
)
from tfdist.config.strategy_spec import StrategySpec

__all__ = ["SPEC"]

SPEC = StrategySpec(
    name="multi_worker",
    summary="several processes, by TensorFlow's collectives",
    create="tfdist.strategies.multi_worker.strategy:create",
    topology=Topology.WORKERS,
    modes=("sync", "stale", "local"),
    options=(CollectiveOptions, GradientOptions, ShardingOptions, MeshOptions),
    check=check_mesh,
    describe=describe_mesh,
    exchanges_gradients=True,
    verified_by="processes",
    tensorflow_connects=True,
)
