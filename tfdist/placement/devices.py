"""Names of devices, and whether they exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.errors import ConfigError
from tfdist.types import DeviceSpec, KerasVariable

__all__ = ["device_of", "existing", "moved", "on"]


def existing(name: str) -> str:
    """The full name of a device.

    Args:
        name: such as `"GPU:1"`, `"cpu"` (the first one) or `"/job:worker/task:1/device:GPU:0"`.

    Raises:
        ConfigError: if there is no such device; the message lists those there are.
    """
    devices = [device.name for device in tf.config.list_logical_devices()]
    short = name.upper() if ":" in name else f"{name.upper()}:0"
    try:
        wanted = tf.DeviceSpec.from_string(name if "/" in name else f"/device:{short}")
    except ValueError:
        raise ConfigError(f"{name!r} is no device. There are: {_short(devices)}.") from None
    index = 0 if wanted.device_index is None else wanted.device_index
    kind = wanted.device_type or _kind_of_task(wanted, devices)
    for device in devices:
        spec = tf.DeviceSpec.from_string(device)
        here = (spec.device_type, spec.device_index) == (kind, index)
        if here and _same_task(wanted, spec):
            with on(device):
                return str(tf.zeros([]).device)
    more = (
        " More logical CPU devices: tf.config.set_logical_device_configuration, before TensorFlow "
        "starts."
        if kind == "CPU" and wanted.job is None
        else ""
    )
    raise ConfigError(f"There is no device {name!r}. There are: {_short(devices)}.{more}")


def _same_task(wanted: DeviceSpec, spec: DeviceSpec) -> bool:
    """Whether a device is of the task that a name means: this one, if it names none.

    TensorFlow lists this process's devices without a task before it knows a cluster.
    """
    own = tf.DeviceSpec.from_string(tf.config.list_logical_devices("CPU")[0].name)
    here = (own.job or "localhost", own.task or 0)
    job, task = here if wanted.job is None else (wanted.job, wanted.task or 0)
    return bool((spec.job or here[0], spec.task or 0) == (job, task))


def _kind_of_task(wanted: DeviceSpec, devices: list[str]) -> str:
    """A task's GPUs, or its CPUs if it has none."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    gpus = [s for s in specs if s.device_type == "GPU" and _same_task(wanted, s)]
    return "GPU" if gpus else "CPU"


def _short(devices: list[str]) -> str:
    local = "/job:localhost/replica:0/task:0/device:"
    return ", ".join(device.removeprefix(local) for device in devices)


def device_of(variable: KerasVariable) -> str:
    """The device of a Keras variable."""
    return str(variable._value.device)


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Runs operations on a device, whatever device was chosen around."""
    with tf.device(None), tf.device(device):
        yield


def moved(variable: KerasVariable, device: str) -> None:
    """Moves a Keras variable with its value.

    Args:
        variable: a Keras variable that is built.
        device: the full name of a device.

    Raises:
        ConfigError: if a strategy keeps copies of it on several devices.
    """
    held = variable._value
    if not hasattr(held, "handle") or hasattr(held, "values"):
        raise ConfigError(
            f"The weight {variable.path!r} belongs to a strategy that keeps it on several devices. "
            "Place models under no strategy, or under strategy='single' or 'pipeline'."
        )
    if held.device == device:
        return
    with eagerly_outside_of_scope(), on(device):
        made = tf.Variable(
            held.read_value(),
            dtype=held.dtype,
            trainable=held.trainable,
            name=held.name.split(":")[0],
            aggregation=held.aggregation,
            synchronization=held.synchronization,
            shape=held.shape,
        )
    # By the first Keras's optimizers know their variables, by the second strategies know theirs.
    made._unique_id = held._unique_id
    made._distribute_strategy = held._distribute_strategy
    variable._value = made
