"""The options that divide a model's state over the processes of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec

from tfdist.config.gradient_options import GradientOptions
from tfdist.config.option import About, Options
from tfdist.errors import ConfigError

if TYPE_CHECKING:
    from tfdist.config.strategy_config import StrategyConfig

__all__ = ["ShardingOptions", "check_sharding", "describe_sharding"]

#: The parts of a model's state that are divided, by the stage of ZeRO.
_DIVIDED = {
    1: "the optimizer's state",
    2: "the optimizer's state and the averaged gradients",
    3: "the weights, the optimizer's state and the averaged gradients",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingOptions(Options):
    """The division of a model's state over the processes."""

    zero: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=3)],
        About(
            "ZeRO's stage: what each process holds a part of. 0: nothing; 1: the optimizer's "
            "state; 2: also the averaged gradients; 3: also the weights, multi_worker only.",
            "Models larger than a device (multi_worker, horovod)",
            why="They are ZeRO's stages.",
        ),
    ] = 0


def check_sharding(config: StrategyConfig) -> None:
    """Refuses options that conflict with the division of the model's state.

    Raises:
        ConfigError: if an option does.
    """
    zero = config.part(ShardingOptions).zero
    if not zero:
        return
    gradients = config.part(GradientOptions)
    if gradients.mode != "sync":
        raise ConfigError(
            f"zero={zero} conflicts with mode={gradients.mode!r}, in which a process has weights "
            "or gradients of its own between two updates. Choose mode='sync', or leave zero out."
        )
    if (config.devices or 1) > 1:
        raise ConfigError(
            f"zero={zero} conflicts with devices={config.devices}: it divides the model's state "
            "over processes of one device each. Start a process for each device with "
            "processes (-n), or leave zero out."
        )
    if zero > 1 and not gradients.is_plain:
        raise ConfigError(
            f"zero={zero} conflicts with the options of gradient updates ({gradients.in_words}), "
            "which need whole gradients. Choose zero=1, or leave the other options out."
        )


def describe_sharding(config: StrategyConfig) -> Mapping[str, str]:
    """The rows of the start table: the update mode, and what is divided if anything is."""
    rows = {"update mode": config.part(GradientOptions).in_words}
    zero = config.part(ShardingOptions).zero
    return {**rows, "ZeRO": f"stage {zero}: {_DIVIDED[zero]} divided"} if zero else rows
