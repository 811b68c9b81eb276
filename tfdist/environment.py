"""The one module that touches environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

__all__ = ["VARIABLES", "merged", "patched", "read", "set_for_good", "snapshot"]

#: Every variable that tfdist reads or sets for the processes it starts, and its meaning.
VARIABLES: dict[str, str] = {
    "TF_CONFIG": "The cluster and this task's place in it, as JSON (TensorFlow's own variable).",
    "TFDIST_CLUSTER": "A file that lists a cluster too large for TF_CONFIG; with TFDIST_TASK.",
    "TFDIST_TASK": "This task of TFDIST_CLUSTER, such as worker:0.",
    "TFDIST_CONFIG": "The job's strategy configuration, as JSON; set by `tfdist run`.",
    "TFDIST_WRITTEN": "The options that are not flags of the command; errors keep their names.",
    "TFDIST_LAUNCHED": "Set to 1 in the tasks that `tfdist run` starts.",
    "TFDIST_RECORD": "The file to which a task that `tfdist run` starts writes its progress.",
    "TFDIST_ELASTIC": "The directory in which the tasks of an elastic job leave their state.",
    "TFDIST_SEED": "The seed that every task of the job gives to Python, NumPy and TensorFlow.",
    "TFDIST_RESULT": "A file to which a task of `tfdist verify` writes what it observed.",
    "TFDIST_VERIFY_STEPS": "How many training steps a task of `tfdist verify` observes.",
    "TF_CPP_MIN_LOG_LEVEL": "TensorFlow's C++ log level; 2 (errors) in the tasks unless it is set.",
    "TF_FORCE_GPU_ALLOW_GROWTH": "Memory growth on GPUs; true in the tasks unless it is set.",
    "KERAS_BACKEND": "Keras's backend, which must be tensorflow.",
    "TF_USE_LEGACY_KERAS": "Makes tf.keras Keras 2; tfdist needs Keras 3.",
    "GRPC_FAIL_FAST": "use_caller in the tasks of parameter_server unless it is set: a server that "
    "has died is then an error, not a wait without an end.",
    "CUDA_VISIBLE_DEVICES": "The GPUs that a process may see.",
    "TFDIST_REPLICAS": "The number of pods of a Kubernetes job, set by its manifest.",
    "TFDIST_PODS": "The pods of each type of task of a Kubernetes job, set by its manifest.",
    "TFDIST_SERVICE": "The headless service of a Kubernetes job's pods, set by its manifest.",
    "HOROVOD_RANK": "This process's number, set by horovodrun.",
    "HOROVOD_SIZE": "The number of processes, set by horovodrun.",
    "PYTHONFAULTHANDLER": "Set to 1 in the tasks, so that the log of a crash has its stacks.",
    "PYTHONUNBUFFERED": "Set to 1 in the tasks, so that logs are complete when a task dies.",
    "XDG_CACHE_HOME": "Where `tfdist build-horovod` keeps its wheels; ~/.cache unless it is set.",
    "COLUMNS": "Width of the terminal, carried over to the chief.",
}


def read(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The value of a variable of the table, or None if it is unset or empty.

    Args:
        name: a key of `VARIABLES`.
        environ: where to look; by default the process's own environment.

    Raises:
        KeyError: if the name is not in the table.
    """
    if name not in VARIABLES:
        raise KeyError(name)
    return (os.environ if environ is None else environ).get(name) or None


def snapshot() -> dict[str, str]:
    """A copy of the process's environment."""
    return dict(os.environ)


def merged(
    changes: Mapping[str, str | None], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """A new environment for a child: `base`, by default this process's, with changes.

    Args:
        changes: new values; None removes a variable.
        base: the environment to start from.
    """
    environ = snapshot() if base is None else dict(base)
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    return environ


def set_for_good(changes: Mapping[str, str]) -> None:
    """Sets variables of this process, for a library that reads them now and later."""
    os.environ.update(changes)


@contextlib.contextmanager
def patched(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Changes this process's environment within a block and restores it after."""
    before = snapshot()
    after = merged(changes)
    try:
        _replace(after)
        yield
    finally:
        _replace(before)


def _replace(environ: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)
