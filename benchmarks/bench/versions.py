"""The versions of what was measured."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

__all__ = ["versions_of"]


def versions_of(packages: Iterable[str]) -> str:
    """The installed ones of some packages, each with its version, in one line of text."""
    known = []
    for package in packages:
        try:
            known.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(known)
