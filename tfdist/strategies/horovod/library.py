"""The installed Horovod: found, checked and imported, or an error with the install command."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from tfdist.cluster.validation.machine import installed_version
from tfdist.errors import ConfigError
from tfdist.utils.messages import logger

__all__ = ["BUILD_COMMAND", "built_for", "is_installed", "load", "problem", "shut_down_at_exit"]

#: The one command that builds Horovod for the installed TensorFlow.
BUILD_COMMAND = "tfdist build-horovod"


def is_installed() -> bool:
    """Whether a package named horovod can be imported."""
    return importlib.util.find_spec("horovod") is not None


def built_for() -> str | None:
    """The version of TensorFlow that the installed Horovod was built against, or None."""
    spec = importlib.util.find_spec("horovod")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        with contextlib.suppress(OSError, ValueError):
            metadata = json.loads((Path(folder) / "metadata.json").read_text())
            return str(metadata["tensorflow"]) if "tensorflow" in metadata else None
    return None


def problem() -> str | None:
    """The reason why Horovod cannot be used here, or None. Imports neither it nor TensorFlow."""
    if not is_installed():
        return (
            "Horovod is not installed. PyPI has its source only, which does not compile against "
            f"current TensorFlow as it is. Run: {BUILD_COMMAND}"
        )
    against, here = built_for(), installed_version("tensorflow")
    if against is None:
        return f"The installed Horovod was built without TensorFlow. Run: {BUILD_COMMAND}"
    if here is not None and against != here:
        return (
            f"The installed Horovod was built for TensorFlow {against}, and this is TensorFlow "
            f"{here}. Run: {BUILD_COMMAND}"
        )
    return None


@functools.cache
def load() -> ModuleType:
    """The module `horovod.tensorflow`.

    Raises:
        ConfigError: if Horovod is missing, or was built for another TensorFlow.
    """
    result = problem()
    if result is not None:
        raise ConfigError(result)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module("horovod.tensorflow")
    except Exception as error:  # A library that does not load raises TensorFlow's own errors.
        raise ConfigError(
            f"The installed Horovod cannot be loaded: {type(error).__name__}: {error}\n"
            f"Build it again: {BUILD_COMMAND} --force"
        ) from error


def shut_down_at_exit(hvd: Any, seconds: float = 30.0) -> None:
    """Shuts Horovod down when the process exits, as `hvd.init` asks for, but within a deadline.

    Horovod takes leave of the other processes, and waits for a stopped one as long as Gloo does.

    Args:
        hvd: the module `horovod.tensorflow`, which has been initialised.
        seconds: the deadline.
    """
    leaves, has_left = threading.Event(), threading.Event()

    def watch() -> None:
        leaves.wait()  # From Python 3.12 on no thread can start when the process exits.
        if not has_left.wait(seconds):
            logger.error(
                f"Horovod has not shut down within {seconds:g} s: another process does not answer. "
                "This one exits without it."
            )
            os._exit(1)

    def shut_down() -> None:
        leaves.set()
        hvd.shutdown()
        has_left.set()

    threading.Thread(target=watch, name="tfdist leaves Horovod", daemon=True).start()
    atexit.unregister(hvd.shutdown)
    atexit.register(shut_down)
