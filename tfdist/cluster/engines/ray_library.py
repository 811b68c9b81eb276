"""The one place that imports Ray, which is large and optional."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from tfdist.errors import ConfigError

__all__ = ["check", "library"]


def check() -> None:
    """Looks for Ray without importing it.

    Raises:
        ConfigError: if it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--on ray needs Ray, which is not installed here. Run `pip install 'tfdist[ray]'`, on "
            "the nodes too, or leave --on out."
        )


def library(module: str = "ray") -> Any:
    """Ray, or a module of it.

    Args:
        module: such as `"ray.exceptions"`.
    """
    return importlib.import_module(module)
