"""Checks the versions, variables and devices that this machine gives to a training.

Versions are compared with the metadata of tfdist; nothing is imported. TensorFlow is asked only if
there are GPUs, since it alone knows whether it can use them.
"""

from __future__ import annotations

import importlib.util
import json
import operator
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata

from tfdist import environment
from tfdist.cluster import resources
from tfdist.cluster.validation.finding import Finding, error, warning
from tfdist.errors import INSTALL_TENSORFLOW, ConfigError
from tfdist.utils.messages import warn

__all__ = [
    "check_versions",
    "cpu_count",
    "in_range",
    "installed_version",
    "machine_findings",
    "memory",
    "ranges",
    "require_tensorflow",
    "version_findings",
    "versions",
]

_GIB = 1024**3
_SECONDS_FOR_TENSORFLOW = 120.0
_CONTAINER_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")


def machine_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The findings on the environment variables and devices for a training.

    Args:
        environ: the environment variables.
    """
    yield _legacy_keras(environ)
    yield _backend(environ)
    yield _devices(environ)


def _legacy_keras(environ: Mapping[str, str]) -> Finding:
    name = "TF_USE_LEGACY_KERAS"
    value = environment.read(name, environ)
    if value in ("1", "true", "True"):
        problem = f'"{value}" makes tf.keras Keras 2. tfdist needs Keras 3.'
        return error(name, problem, f"Run: unset {name}")
    return Finding("ok", name, "not set" if value is None else f'"{value}" leaves it off')


def _backend(environ: Mapping[str, str]) -> Finding:
    name = "KERAS_BACKEND"
    value = environment.read(name, environ)
    if value is not None and value != "tensorflow":
        problem = f'"{value}" is not "tensorflow", the only backend with tf.distribute.'
        return error(name, problem, f"Run: unset {name}")
    if value is not None:
        return Finding("ok", name, value)
    path, configured = _configured_backend(environ)
    if configured not in (None, "tensorflow"):
        problem = f'Not set, and {path} says "{configured}"; tf.distribute needs "tensorflow".'
        return error(name, problem, f"Run: export {name}=tensorflow, or correct the file.")
    return Finding("ok", name, "not set: tensorflow")


def _configured_backend(environ: Mapping[str, str]) -> tuple[pathlib.Path, str | None]:
    """The backend in Keras's own configuration file."""
    home = environ.get("KERAS_HOME") or os.path.join(environ.get("HOME") or "~", ".keras")
    path = pathlib.Path(home).expanduser() / "keras.json"
    try:
        content = json.loads(path.read_text())
        return path, content.get("backend")
    except (OSError, ValueError, AttributeError):
        return path, None


#: The advice where GPUs cannot be listed.
_WITHOUT_GPUS = "Repair the driver; or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU."


def _devices(environ: Mapping[str, str]) -> Finding:
    cpus = cpu_count()
    host = f"{cpus} CPU core{'s' if cpus > 1 else ''}, {memory() / _GIB:.1f} GiB of memory"
    gpus = resources.visible(environ)
    if gpus:
        return _compared(gpus, environ, host)
    hidden = resources.visible({k: v for k, v in environ.items() if k != "CUDA_VISIBLE_DEVICES"})
    if hidden:
        value = environ.get("CUDA_VISIBLE_DEVICES", "")
        problem = f'CUDA_VISIBLE_DEVICES="{value}" hides {_count(hidden)}; {host}'
        return warning("Devices", problem, "Unset it to train on the GPUs.")
    failing = resources.failure(environ)
    if failing is not None:
        return warning("Devices", f"{failing}; {host}", _WITHOUT_GPUS)
    return Finding("ok", "Devices", f"no NVIDIA GPU; {host}")


def _count(gpus: Sequence[str]) -> str:
    return f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}"


def _compared(gpus: tuple[str, ...], environ: Mapping[str, str], host: str) -> Finding:
    """The GPUs that are counted, compared with those that TensorFlow sees."""
    names = ", ".join(gpus)
    seen = _of_tensorflow(environ)
    if seen is None:
        problem = f"{_count(gpus)} (number {names}), but TensorFlow could not be asked; {host}"
        return warning("Devices", problem, 'Try: python -c "import tensorflow".')
    count, cuda = seen
    listed = environment.read("CUDA_VISIBLE_DEVICES", environ)
    differ = resources.disagreement(gpus, count, cuda=cuda, listed=listed)
    if differ is not None:
        return error("Devices", f"{differ[0]} {host}", differ[1])
    return Finding("ok", "Devices", f"{_count(gpus)} (number {names}); {host}")


def _of_tensorflow(environ: Mapping[str, str]) -> tuple[int, bool] | None:
    """The GPUs that TensorFlow sees, and whether it was built for CUDA; None if it fails.

    Only TensorFlow itself knows whether it finds its libraries. It is asked in another process, so
    that this one stays without it.
    """
    asked = (
        "import tensorflow as tf\n"
        "seen = len(tf.config.list_physical_devices('GPU'))\n"
        "print('tfdist', seen, int(tf.sysconfig.get_build_info()['is_cuda_build']))"
    )
    try:
        answer = subprocess.run(
            [sys.executable, "-c", asked],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_SECONDS_FOR_TENSORFLOW,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"^tfdist (\d+) ([01])$", answer.stdout, re.MULTILINE)
    return (int(match[1]), match[2] == "1") if match else None


def cpu_count() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> int:
    """The memory that this process may use, in bytes: the machine's, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):
        return total


# The versions of Python and of packages.

_SHOWN = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
#: Distributions that hold TensorFlow under another name.
_OTHER_TENSORFLOWS = ("tensorflow-cpu", "tf-nightly", "tensorflow-macos", "tensorflow-rocm")
_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
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
        remedy = INSTALL_TENSORFLOW if name == "tensorflow" else f"Run: {install}"
        return error(shown, "It is not installed.", remedy)
    if not in_range(version, wanted):
        problem = f"Version {version} is not {wanted}, which this tfdist was tested with."
        return error(shown, problem, f"Run: {install}")
    if not wanted:
        problem = f"Version {version}; the supported range is not known here."
        return warning(shown, problem, "Install tfdist with pip, so that its metadata is there.")
    return Finding("ok", shown, version)


def require_tensorflow() -> None:
    """Raises ConfigError if TensorFlow is not there; it is not imported."""
    if importlib.util.find_spec("tensorflow") is None:
        raise ConfigError(f"TensorFlow is not installed. {INSTALL_TENSORFLOW}")


def check_versions(lookup: Callable[[str], str | None] | None = None) -> None:
    """Warns of versions of TensorFlow, Keras and NumPy that are later than those of the tests.

    Args:
        lookup: as of `version_findings`.

    Raises:
        ConfigError: for an earlier version, which lacks things that tfdist imports.
    """
    lookup, wanted = lookup or installed_version, _wanted()
    for name, shown in _SHOWN.items():
        finding = _package_finding(name, shown, wanted[name], lookup)
        lowest = ",".join(part for part in wanted[name].split(",") if part.strip()[0] == ">")
        version = lookup(name)
        if version is not None and not in_range(version, lowest):
            raise ConfigError(str(finding))
        if finding.severity == "error":
            warn(f"tfdist: {finding}")


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """The versions of Python, tfdist and the packages that it trains with, as far as they are here.

    Reads the metadata of distributions and imports none of them.
    """
    names = {"tfdist": ("tfdist",), "TensorFlow": ("tensorflow", *_OTHER_TENSORFLOWS)}
    names |= {shown: (name,) for name, shown in _SHOWN.items() if shown not in names}
    candidates = {
        shown: filter(None, map(installed_version, each)) for shown, each in names.items()
    }
    return {"Python": platform.python_version()} | {
        shown: version for shown, each in candidates.items() if (version := next(each, None))
    }


def _wanted() -> Mapping[str, str]:
    """The supported ranges. NumPy's is TensorFlow's own."""
    own = ranges(_requires("tfdist"), extra="cpu")
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


def ranges(requirements: Iterable[str], extra: str = "") -> dict[str, str]:
    """The version ranges of requirements such as `keras>=3.15,<3.16`, and of those of an extra."""
    bounds = {}
    for requirement in requirements:
        text, _, marker = requirement.partition(";")
        match = re.match(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?\s*(.*)", text)
        if match and ("extra" not in marker or f'extra == "{extra}"' in marker.replace("'", '"')):
            parts = [part.strip() for part in match[2].strip("() ").split(",") if part.strip()]
            # The lower bound first: it is what people look for.
            bounds[match[1].lower()] = ",".join(sorted(parts, reverse=True))
    return bounds


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
