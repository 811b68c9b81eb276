"""The process that a target runs its cases in: `python -m tests.harness.worker FD TARGET`.

It dies with its parent: a thread watches standard input, which ends when the parent does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from tests.harness.targets import TARGETS, Target

#: Of <sys/prctl.h>: the signal that a process gets when the thread that has started it ends.
_PR_SET_PDEATHSIG = 1


def _watch_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


@contextlib.contextmanager
def _without_sklearn() -> Iterator[None]:
    """Keras imports scikit-learn, with all of SciPy, for its wrappers: a second in each process."""
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    yield
    del sys.modules["sklearn"]


def make_strategy(target: Target) -> Any:
    """Configures TensorFlow's devices and threads and creates the target's strategy."""
    with _without_sklearn():
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
    """Runs one case from a clean Keras state."""
    import keras

    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    module, _, name = function.partition(":")
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
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Also where it is stopped.
    threading.Thread(target=_watch_parent, daemon=True).start()
    connection = Connection(descriptor)
    strategy = make_strategy(TARGETS[name])
    gc.collect()
    gc.freeze()  # TensorFlow's own objects, half a million, are not looked at after each case.
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


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
