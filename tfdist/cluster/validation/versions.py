"""Checks the versions of Python and of packages against the metadata of tfdist."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata

from tfdist.cluster.validation.finding import Finding, error, warning

__all__ = ["in_range", "installed_version", "ranges", "version_findings"]

_SHOWN = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
#: Distributions that hold TensorFlow under another name.
_OTHER_TENSORFLOWS = ("tensorflow-cpu", "tf-nightly", "tensorflow-macos", "tensorflow-rocm")
_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": lambda version, bound: version >= bound,
    "<=": lambda version, bound: version <= bound,
    "==": lambda version, bound: version == bound,
    "!=": lambda version, bound: version != bound,
    ">": lambda version, bound: version > bound,
    "<": lambda version, bound: version < bound,
}


def version_findings(lookup: Callable[[str], str | None] | None = None) -> Iterator[Finding]:
    """Whether Python, TensorFlow, Keras and NumPy have versions that tfdist supports.

    Args:
        lookup: gives the installed version of a distribution, or None; by default from the metadata
            of this Python. Nothing is imported.
    """
    lookup = lookup or installed_version
    wanted = _wanted()
    python = platform.python_version()
    if in_range(python, wanted["python"]):
        yield Finding("ok", "Python", python)
    else:
        problem = f"Python {python} is not {wanted['python']}."
        yield error("Python", problem, f"Make an environment with Python {wanted['python']}.")
    for name, shown in _SHOWN.items():
        yield _package_finding(name, shown, wanted[name], lookup)


def _package_finding(
    name: str, shown: str, wanted: str, lookup: Callable[[str], str | None]
) -> Finding:
    install = f'pip install "{name}{wanted}"'
    version = lookup(name)
    if version is None and name == "tensorflow":
        for other in _OTHER_TENSORFLOWS:
            version = version or lookup(other)
    if version is None:
        return error(shown, "It is not installed.", f"Run: {install}")
    if not in_range(version, wanted):
        problem = f"Version {version} is not {wanted}, which this tfdist was tested with."
        return error(shown, problem, f"Run: {install}")
    if not wanted:
        problem = f"Version {version}; the supported range is not known here."
        return warning(shown, problem, "Install tfdist with pip, so that its metadata is there.")
    return Finding("ok", shown, version)


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _wanted() -> Mapping[str, str]:
    """The supported ranges. NumPy's is TensorFlow's own."""
    own = ranges(_requires("tfdist"))
    return {
        "python": _required_python(),
        "tensorflow": own.get("tensorflow", ""),
        "keras": own.get("keras", ""),
        "numpy": ranges(_requires("tensorflow")).get("numpy", ">=1.26"),
    }


def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def _required_python() -> str:
    try:
        return metadata.metadata("tfdist")["Requires-Python"] or ">=3.11"
    except (metadata.PackageNotFoundError, KeyError):
        return ">=3.11"


def ranges(requirements: Iterable[str]) -> dict[str, str]:
    """The version ranges of requirements such as `keras>=3.15,<3.16`, without those of extras."""
    found = {}
    for requirement in requirements:
        text, _, marker = requirement.partition(";")
        match = re.match(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?\s*(.*)", text)
        if match and "extra" not in marker:
            parts = [part.strip() for part in match[2].strip("() ").split(",") if part.strip()]
            # The lower bound first: it is what people look for.
            found[match[1].lower()] = ",".join(sorted(parts, reverse=True))
    return found


def in_range(version: str, wanted: str) -> bool:
    """Whether a version meets all bounds of a range such as `>=2.21,<2.22`.

    A pre-release counts as its release: the bounds of tfdist are about series, not candidates.
    """
    number = _number(version)
    for part in filter(None, (part.strip() for part in wanted.split(","))):
        match = re.match(r"(>=|<=|==|!=|>|<)\s*([\d.]+)", part)
        if match and not _OPERATORS[match[1]](number, _number(match[2])):
            return False
    return True


def _number(version: str) -> tuple[int, ...]:
    """The release numbers, padded so that 2.21 equals 2.21.0."""
    match = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in match[0].split(".")] if match else []
    return tuple((*parts, 0, 0, 0, 0)[:4])
