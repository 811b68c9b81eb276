"""Settings of a program that TensorFlow takes before it starts only.

A scope is opened after TensorFlow has started, so that such a setting of the program's, which works
on one device, would end in an error there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras.hooks import Hook
from tfdist.utils.messages import logger

__all__ = ["hooks"]

_DEVICES = "`tfdist run --devices` sets the number of a process's devices"
_VISIBLE = "CUDA_VISIBLE_DEVICES in the environment of the job chooses GPUs"
_GROWTH = "The memory of GPUs grows as it is needed"

#: Functions below `tf.config`, and how the same is set for a job.
_SETTERS = {
    "set_logical_device_configuration": _DEVICES,
    "experimental.set_virtual_device_configuration": _DEVICES,
    "set_visible_devices": _VISIBLE,
    "experimental.set_visible_devices": _VISIBLE,
    "experimental.set_memory_growth": _GROWTH,
    "threading.set_inter_op_parallelism_threads": "Set TF_NUM_INTEROP_THREADS in its environment",
    "threading.set_intra_op_parallelism_threads": "Set TF_NUM_INTRAOP_THREADS in its environment",
}


def hooks() -> list[Hook]:
    """The seams of TensorFlow's public API."""
    found = []
    for path, instead in _SETTERS.items():
        *modules, name = path.split(".")
        owner = functools.reduce(getattr, modules, tf.config)
        found.append(Hook(owner, name, functools.partial(_set, f"tf.config.{path}", instead)))
    return found


def _set(path: str, instead: str, original: Callable[..., None]) -> Callable[..., None]:
    """A setting that comes too late changes no result, so that the program may go on without it."""

    @functools.wraps(original)
    def setter(*args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except RuntimeError:  # Its only one: the setting cannot be changed any more.
            if getattr(tf.distribute.get_strategy(), "is_chief", True):
                logger.warning(
                    f"{path} of the program has no effect: the job's TensorFlow has started "
                    f"already. {instead}."
                )

    return setter
