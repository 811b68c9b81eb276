"""What a process that a target runs its cases in does.

It dies with its parent: a thread watches standard input, which ends when the parent does.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import threading
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

from tests.harness.targets import TARGETS, Target


def _watch_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


def make_strategy(target: Target) -> Any:
    """Configures TensorFlow's devices and threads and creates the target's strategy."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2 * target.devices)
    if target.devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(target.devices)]
        tf.config.set_logical_device_configuration(cpu, logical)
    if target.strategy is None:
        return None
    module, _, name = target.strategy.partition(":")
    return getattr(importlib.import_module(module), name)(**target.options)


def run_case(strategy: Any, function: str, kwargs: dict[str, Any]) -> Any:
    """Runs one case from a clean Keras state; what names a difference from one process ends it."""
    import keras

    from tfdist.errors import EquivalenceWarning

    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    module, _, name = function.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("error", EquivalenceWarning)
        return getattr(importlib.import_module(module), name)(strategy, **kwargs)


def _answer(strategy: Any, request: tuple[str, dict[str, Any]]) -> tuple[bool, Any]:
    function, kwargs = request
    print(f"--- {function} {kwargs}", flush=True)
    try:
        return True, run_case(strategy, function, kwargs)
    except BaseException as error:
        traceback.print_exc()
        return False, (f"{type(error).__name__}: {error}", traceback.format_exc())
    finally:
        random.seed(0)
        gc.collect()


def main(descriptor: int, name: str) -> None:
    """Serves calls until the parent closes the connection."""
    threading.Thread(target=_watch_parent, daemon=True).start()
    connection = Connection(descriptor)
    strategy = make_strategy(TARGETS[name])
    connection.send((True, "ready"))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            os._exit(0)
        answer = _answer(strategy, request)
        try:
            connection.send(answer)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            connection.send((False, (f"The result cannot be pickled: {text}", text)))
