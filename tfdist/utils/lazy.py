"""Public names that are imported when they are first used.

`import tfdist` must not import TensorFlow: the launcher and the doctor run without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.errors import INSTALL_TENSORFLOW


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
