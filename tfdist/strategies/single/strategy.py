"""One device."""

from __future__ import annotations

import tensorflow as tf

from tfdist._tf.distribute import SingleExtended
from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.strategies.base import StrategyMixin
from tfdist.strategies.devices import prepare_devices


class Single(StrategyMixin, tf.distribute.OneDeviceStrategy):  # type: ignore[misc]
    """One replica on one device: the reference that the other strategies are compared with.

    Args:
        device: the device, such as `"/GPU:0"`. By default the first GPU, or the CPU.
        rule: the treatment of gradients before the optimizer applies them.
    """

    name = "single"

    def __init__(self, device: str | None = None, rule: GradientOptions = PLAIN) -> None:
        self.rule = rule
        if device is None:
            device = "/GPU:0" if tf.config.list_logical_devices("GPU") else "/CPU:0"
        tf.distribute.Strategy.__init__(self, SingleExtended(self, device))


def create(config: StrategyConfig, member: None = None) -> Single:
    """Makes the strategy of this process.

    Args:
        config: the configuration.
        member: None, since one process joins no cluster.
    """
    del member
    return Single(prepare_devices(config.devices)[0], config.part(GradientOptions))
