"""A strategy of one process whose devices are all of the machine's CPU."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.config.option import About, Options, Positive
from tfdist.config.strategy_spec import StrategySpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyOptions(Options):
    """The options that only this strategy has."""

    wheels: Annotated[Positive, About("How many wheels it has.", "Options of toy")] = 4


SPEC = StrategySpec(
    name="toy",
    summary="a strategy that a test has made",
    create="toy_strategy:create",
    modes=("sync", "local"),
    options=(GradientOptions, ToyOptions),
    exchanges_gradients=True,
    processes_are_devices=True,
    verified_by="devices",
    describe=lambda config: {
        "update mode": f"toy {config.mode} on {config.part(ToyOptions).wheels} wheels"
    },
)


def create(config: Any, member: Any) -> Any:
    """The strategy of a job."""
    from tfdist.strategies.devices import prepare_devices

    return make(prepare_devices(config.devices), config.part(GradientOptions))


def make(devices: Any = None, rule: GradientOptions = PLAIN) -> Any:
    """The strategy on devices, or on all."""
    from tfdist.strategies.mirrored.strategy import Mirrored

    class Toy(Mirrored):
        name = "toy"

    return Toy(devices, rule)
