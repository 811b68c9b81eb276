"""Imports: public names when they are first used, TensorFlow in a task, an optional library.

`import tfdist` must not import TensorFlow: the launcher and the doctor run without it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from tfdist.errors import INSTALL_TENSORFLOW, ConfigError

#: TensorFlow 2.21 writes lines such as `I0000 … oneDNN custom operations are on` straight to
#: standard error, before it looks at TF_CPP_MIN_LOG_LEVEL (tensorflow#100442).
_NOISE = (b"I0000 ", b"WARNING: All log messages before absl::InitializeLog()")
#: It complains of a missing CUDA driver on machines that have no GPU.
_NO_DRIVER = b"failed call to cuInit"


def lazy_attributes(
    package: str, modules: Mapping[str, str], gone: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__` (PEP 562).

    Args:
        package: the package's name.
        modules: for each public name, the module that defines it. A name whose module is that of
            the package with this name stands for the module itself.
        gone: names that others expect here and do not find, each with what to do instead.
    """

    def get(name: str) -> Any:
        if name not in modules:
            advice = f". {gone[name]}" if gone and name in gone else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")
        try:
            module = importlib.import_module(modules[name])
        except ModuleNotFoundError as error:
            if error.name != "tensorflow":
                raise
            raise ImportError(f"TensorFlow is not installed. {INSTALL_TENSORFLOW}") from error
        return module if modules[name] == f"{package}.{name}" else getattr(module, name)

    return get, lambda: list(modules)


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """A block that imports TensorFlow: without its messages about itself, and faster.

    Standard error is held back in the block; then the lines worth reading are passed on. Python
    does not look for garbage in the block, nor ever again among the objects that were made in it:
    TensorFlow and Keras make 340,000 that stay, and each full collection would visit them all.
    """
    sys.stderr.flush()
    gc.disable()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            gc.freeze()
            gc.enable()
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held:
                if not _is_noise(line):
                    os.write(2, line)


def _is_noise(line: bytes) -> bool:
    """Whether a line of TensorFlow's start has nothing that the user could act on."""
    return line.startswith(_NOISE) or (_NO_DRIVER in line and not os.path.exists("/dev/nvidiactl"))


def matplotlib(module: str, purpose: str) -> ModuleType:
    """A module of Matplotlib, which is optional.

    Args:
        module: its name, such as `figure`; empty for the package.
        purpose: the thing that needs it, for the message.

    Raises:
        ConfigError: if Matplotlib is not installed.
    """
    try:
        return importlib.import_module(f"matplotlib.{module}".rstrip("."))
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs Matplotlib, which is not installed here. Run "
            "`pip install 'tfdist[pictures]'`."
        ) from error
