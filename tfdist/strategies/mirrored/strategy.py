"""Several devices of one process."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist._tf.distribute import LocalExtended
from tfdist.comm.launchers import replace_launchers
from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.strategies.base import StrategyMixin
from tfdist.strategies.devices import prepare_devices


class Mirrored(StrategyMixin, tf.distribute.MirroredStrategy):  # type: ignore[misc]
    """One replica on each GPU, or logical CPU device, of this process, trained synchronously.

    Args:
        devices: device names, such as `["GPU:0", "GPU:1"]`. By default all GPUs, or if there is
            none all logical CPU devices.
        rule: the treatment of gradients before the optimizer applies them.

    Raises:
        ValueError: if a device is named twice.
        ConfigError: if this process has no such device.
    """

    name = "mirrored"

    def __init__(self, devices: Sequence[str] | None = None, rule: GradientOptions = PLAIN) -> None:
        if isinstance(devices, int):
            raise ConfigError(
                f"tfdist.Mirrored(devices={devices}) takes names of devices, such as "
                f"['GPU:0', 'GPU:1']. For a number of them: tfdist.strategy('mirrored', "
                f"devices={devices})."
            )
        if devices is not None and len(set(devices)) != len(devices):
            raise ValueError(
                f"devices={list(devices)!r} names a device twice. Each device holds one replica: "
                "name each once."
            )
        self.rule = rule
        extended = LocalExtended(self, devices=list(devices) if devices else None)
        tf.distribute.Strategy.__init__(self, extended)
        _check_devices(extended.worker_devices)
        replace_launchers(extended)


def _check_devices(names: Sequence[str]) -> None:
    """Rejects devices that are not there: their replicas would wait for each other for ever."""
    present = {_kind_and_number(device.name) for device in tf.config.list_logical_devices()}
    absent = [name for name in map(_kind_and_number, names) if name not in present]
    if absent:
        raise ConfigError(
            f"devices={[_kind_and_number(name) for name in names]} names {absent[0]!r}, and this "
            f"process has {', '.join(sorted(present))}. To split the CPU, make the strategy with "
            f"tfdist.strategy('mirrored', devices={len(names)}), or call "
            "tf.config.set_logical_device_configuration before anything else."
        )


def _kind_and_number(device: str) -> str:
    """`"CPU:1"` of `"/job:localhost/replica:0/task:0/device:CPU:1"`, and of itself."""
    return ":".join(device.upper().split(":")[-2:])


def create(config: StrategyConfig, member: None = None) -> Mirrored:
    """Makes the strategy of this process.

    Args:
        config: the configuration.
        member: None, since one process joins no cluster.
    """
    del member
    return Mirrored(prepare_devices(config.devices), config.part(GradientOptions))
