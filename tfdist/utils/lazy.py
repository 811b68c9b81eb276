"""Public names that are imported when they are first used, and a library that is optional.

`import tfdist` must not import TensorFlow: the launcher and the doctor run without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from tfdist.errors import INSTALL_TENSORFLOW, ConfigError


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
            "`pip install 'tfdist[pictures]'`, or leave the picture out."
        ) from error
