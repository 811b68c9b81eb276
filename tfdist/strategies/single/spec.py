"""The description of the strategy `single` for the rest of tfdist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdist.config.strategy_spec import NO_EXCHANGE, StrategySpec
from tfdist.errors import ConfigError

if TYPE_CHECKING:
    from tfdist.config.strategy_config import StrategyConfig

__all__ = ["SPEC"]


def _check(config: StrategyConfig) -> None:
    if (config.devices or 1) > 1:
        raise ConfigError(
            f"devices={config.devices} conflicts with strategy='single', which uses one device. "
            "Choose strategy='mirrored', or leave devices out."
        )


SPEC = StrategySpec(
    name="single",
    summary="one device",
    create="tfdist.strategies.single.strategy:create",
    refuses=(NO_EXCHANGE,),
    check=_check,
    one_device=True,
)
