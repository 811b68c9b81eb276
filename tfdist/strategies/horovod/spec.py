"""What the rest of tfdist knows of the strategy `horovod`."""

from __future__ import annotations

from typing import Any

from tfdist.cluster.spec import Topology
from tfdist.config import gradient_options, horovod_options
from tfdist.config.strategy_spec import StrategySpec
from tfdist.errors import ConfigError

__all__ = ["SPEC"]


def _check(config: Any) -> None:
    if (config.devices or 1) > 1:
        raise ConfigError(
            f"devices={config.devices} conflicts with strategy='horovod', which has one process "
            "for each device. Leave devices out: -n counts the processes."
        )
    horovod_options.check(config)
    gradient_options.check(config)


SPEC = StrategySpec(
    name="horovod",
    summary="several processes, by Horovod's ring all-reduce",
    create="tfdist.strategies.horovod.start:create",
    topology=Topology.WORKERS,
    modes=("sync", "stale", "local"),
    own_options=(
        *("reduction", "groups", "fusion_mb", "cycle_ms", "hierarchical", "autotune"),
        *("timeline", "stall_timeout"),
    ),
    lacking=": it is an option of Horovod.",
    check=_check,
    exchanges_gradients=True,
    one_device=True,
    verified_by="processes",
    problem="tfdist.strategies.horovod.library:problem",
    started_elsewhere="tfdist.strategies.horovod.rendezvous:started_by_horovodrun",
)
