"""Making the strategy `mirrored`."""

from __future__ import annotations

from tfdist.config.strategy_config import StrategyConfig
from tfdist.strategies.devices import prepare_devices
from tfdist.strategies.mirrored.strategy import Mirrored

__all__ = ["create"]


def create(config: StrategyConfig, member: None = None) -> Mirrored:
    """Makes the strategy of this process.

    Args:
        config: the configuration.
        member: None, since one process joins no cluster.
    """
    del member
    return Mirrored(prepare_devices(config.devices))
