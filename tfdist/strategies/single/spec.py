"""What the rest of tfdist knows of the strategy `single`."""

from __future__ import annotations

from typing import Any

from tfdist.config import gradient_options
from tfdist.config.strategy_spec import StrategySpec
from tfdist.errors import ConfigError

__all__ = ["SPEC"]


def _check(config: Any) -> None:
    if (config.devices or 1) > 1:
        raise ConfigError(
            f"devices={config.devices} conflicts with strategy='single', which uses one device. "
            "Choose strategy='mirrored', or leave devices out."
        )
    gradient_options.check(config)


SPEC = StrategySpec(
    name="single",
    summary="one device",
    create="tfdist.strategies.single.strategy:create",
    refuses=(gradient_options.NO_EXCHANGE,),
    check=_check,
    one_device=True,
)
