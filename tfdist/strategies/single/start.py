"""Making the strategy `single`."""

from __future__ import annotations

from tfdist.config.strategy_config import StrategyConfig
from tfdist.strategies.devices import prepare_devices
from tfdist.strategies.single.strategy import Single

__all__ = ["create"]


def create(config: StrategyConfig, member: None = None) -> Single:
    """Makes the strategy of this process.

    Args:
        config: the configuration.
        member: None, since one process joins no cluster.
    """
    del member
    return Single(prepare_devices(config.devices)[0])
