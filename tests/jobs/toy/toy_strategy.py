"""A strategy of one process whose devices are all of the machine's CPU."""

from __future__ import annotations

from typing import Any

from tfdist.config import gradient_options
from tfdist.config.strategy_spec import StrategySpec

SPEC = StrategySpec(
    name="toy",
    summary="a strategy that a test has made",
    create="toy_strategy:create",
    modes=("sync", "local"),
    check=gradient_options.check,
    exchanges_gradients=True,
    processes_are_devices=True,
    verified_by="devices",
    describe=lambda config: {"update mode": f"toy {config.mode}"},
)


def create(config: Any, member: Any) -> Any:
    """The strategy of a job."""
    from tfdist.strategies.devices import prepare_devices

    return make(prepare_devices(config.devices))


def make(devices: Any = None) -> Any:
    """The strategy on devices, or on all."""
    from tfdist.strategies.mirrored.strategy import Mirrored

    class Toy(Mirrored):
        name = "toy"

    return Toy(devices)
