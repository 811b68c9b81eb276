"""The directory of a job's log files."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import tempfile
from pathlib import Path

from tfdist.cli import summary
from tfdist.errors import ConfigError
from tfdist.launcher.plan import JobPlan

__all__ = ["default_place", "prepare"]

_LOGS = Path("tfdist-logs")


def default_place() -> Path:
    """A directory of this job's own, named after the time and this process."""
    return _LOGS / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"


def prepare(plan: JobPlan, *, chosen: bool) -> JobPlan:
    """Makes a plan's log directory.

    Args:
        plan: the plan.
        chosen: whether the user chose the directory.

    Returns:
        The plan, with a temporary directory if the default one cannot be written: a training
        does not fail for its logs.

    Raises:
        ConfigError: if a directory that the user chose cannot be written.
    """
    try:
        _make_writable(plan.log_dir)
    except OSError as error:
        if chosen:
            raise ConfigError(
                f"--log-dir {str(plan.log_dir)!r} cannot be written: {error.strerror}. Choose "
                "another directory."
            ) from error
        return _with_temporary_logs(plan, error)
    if not chosen:
        _point_latest(plan.log_dir)
    _write(plan)
    return plan


def _make_writable(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as probe:
        probe.write(b".")


def _with_temporary_logs(plan: JobPlan, error: OSError) -> JobPlan:
    try:
        place = Path(tempfile.mkdtemp(prefix="tfdist-logs-"))
    except OSError:
        return plan  # Each task's log reports that it cannot be written; the training goes on.
    summary.note(
        f"Cannot write logs to {str(plan.log_dir)!r}: {error.strerror}. They go to {place}."
    )
    names = {str(path): str(place / path.name) for path in plan.files}
    tasks = tuple(
        dataclasses.replace(
            each,
            log=place / each.log.name,
            environ={k: names.get(v, v) if v else v for k, v in each.environ.items()},
        )
        for each in plan.tasks
    )
    files = {Path(names[str(path)]): text for path, text in plan.files.items()}
    moved = dataclasses.replace(plan, tasks=tasks, log_dir=place, files=files)
    _write(moved)
    return moved


def _write(plan: JobPlan) -> None:
    """Writes the files that the tasks read. Members of one cluster may do so at the same time."""
    for path, text in plan.files.items():
        draft = path.with_name(f".{path.name}-{os.getpid()}")
        draft.write_text(text)
        draft.replace(path)


def _point_latest(directory: Path) -> None:
    """Makes `latest` name this job's directory; a convenience that may fail."""
    link = directory.parent / "latest"
    draft = directory.parent / f".latest-{os.getpid()}"
    with contextlib.suppress(OSError):
        draft.symlink_to(directory.name)
        draft.replace(link)
