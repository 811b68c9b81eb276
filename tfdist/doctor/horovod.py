"""Checks the installed Horovod, without importing it."""

from __future__ import annotations

from tfdist.cluster.checks.finding import Finding, error, warning
from tfdist.doctor.versions import installed_version
from tfdist.horovod.library import BUILD_COMMAND, built_for, is_installed
from tfdist.horovod_build.installed import operations

__all__ = ["horovod_finding"]

_WHERE = "Horovod"


def horovod_finding(strategy: str | None) -> Finding:
    """Whether Horovod is there and was built for the installed TensorFlow.

    Args:
        strategy: the strategy that is to run; without Horovod only "horovod" cannot.
    """
    wanted = strategy == "horovod"
    if not is_installed():
        if wanted:
            return error(_WHERE, "Not installed, and strategy horovod needs it.", _run())
        return Finding("ok", _WHERE, "not installed: only strategy horovod needs it", _run())
    version = installed_version("horovod") or "of an unknown version"
    problem = _problem(version)
    if problem is None:
        ways = ", ".join(operations()) or "nothing to exchange tensors"
        return Finding("ok", _WHERE, f"{version}, built for TensorFlow {built_for()}, with {ways}")
    if wanted:
        return error(_WHERE, problem, _run())
    return warning(_WHERE, f"{problem} Only strategy horovod needs it.", _run())


def _problem(version: str) -> str | None:
    against, here = built_for(), installed_version("tensorflow")
    if against is None:
        return f"Version {version} was built without TensorFlow."
    if here is None:
        return f"Version {version} was built for TensorFlow {against}, and none is installed."
    if against != here:
        return f"Version {version} was built for TensorFlow {against}; this is TensorFlow {here}."
    return None


def _run() -> str:
    return f"Run: {BUILD_COMMAND}"
