"""Public names that are imported when they are first used.

`import tfdist` must not import TensorFlow: the launcher and the doctor run without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_attributes(
    names: Sequence[str], modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A module's `__getattr__` and `__dir__` (PEP 562).

    Args:
        names: the public names.
        modules: for each name, the module that defines it.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get, lambda: list(names)
