"""Checks the resources that this machine and its environment give to a training.

TensorFlow is asked only if there are GPUs, since it alone knows whether it can use them.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

from tfdist import environment
from tfdist.cluster import resources
from tfdist.cluster.validation.finding import Finding, error, warning

__all__ = ["cpu_count", "machine_findings", "memory"]

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


def _devices(environ: Mapping[str, str]) -> Finding:
    cpus = cpu_count()
    host = f"{cpus} CPU core{'s' if cpus > 1 else ''}, {memory() / _GIB:.1f} GiB of memory"
    found = resources.visible(environ)
    if found:
        return _compared(found, environ, host)
    hidden = resources.visible({k: v for k, v in environ.items() if k != "CUDA_VISIBLE_DEVICES"})
    if hidden:
        value = environ.get("CUDA_VISIBLE_DEVICES", "")
        problem = f'CUDA_VISIBLE_DEVICES="{value}" hides {len(hidden)} GPU; {host}'
        return warning("Devices", problem, "Unset it to train on the GPUs.")
    return Finding("ok", "Devices", f"no NVIDIA GPU; {host}")


def _compared(found: tuple[str, ...], environ: Mapping[str, str], host: str) -> Finding:
    """The GPUs that are counted, compared with those that TensorFlow sees."""
    names = ", ".join(found)
    seen = _of_tensorflow(environ)
    if seen is None:
        problem = f"{len(found)} GPU (number {names}), but TensorFlow could not be asked; {host}"
        return warning("Devices", problem, 'Try: python -c "import tensorflow".')
    count, cuda = seen
    listed = environment.read("CUDA_VISIBLE_DEVICES", environ)
    differ = resources.disagreement(found, count, cuda=cuda, listed=listed)
    if differ is not None:
        return error("Devices", f"{differ[0]} {host}", differ[1])
    return Finding("ok", "Devices", f"{len(found)} GPU (number {names}); {host}")


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
    said = re.search(r"^tfdist (\d+) ([01])$", answer.stdout, re.MULTILINE)
    return (int(said[1]), said[2] == "1") if said else None


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
