"""The directory of a job's log files, and the launcher's record there."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tfdist.cli import summary
from tfdist.cluster.spec import Task
from tfdist.cluster.validation.machine import versions
from tfdist.diagnostics import run_data
from tfdist.errors import ConfigError
from tfdist.launcher.plan import SERVER_MODULE, JobPlan, record_of
from tfdist.launcher.supervisor import Outcome
from tfdist.utils import run_record
from tfdist.utils.run_record import Record

__all__ = ["default_log_dir", "describe_job", "launcher_record", "note_done", "prepare"]

_LOGS = Path("tfdist-logs")
#: The files that the last line names at most.
_FILES_SHOWN = 5


def default_log_dir() -> Path:
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
        directory = Path(tempfile.mkdtemp(prefix="tfdist-logs-"))
    except OSError:
        return plan  # Each task's log reports that it cannot be written; the training goes on.
    summary.note(
        f"Cannot write logs to {str(plan.log_dir)!r}: {error.strerror}. They go to {directory}."
    )
    paths = (*plan.files, *(record_of(each.log) for each in plan.tasks))
    names = {str(path): str(directory / path.name) for path in paths}
    tasks = tuple(
        dataclasses.replace(
            each,
            log=directory / each.log.name,
            environ={k: names.get(v, v) if v else v for k, v in each.environ.items()},
        )
        for each in plan.tasks
    )
    files = {Path(names[str(path)]): text for path, text in plan.files.items()}
    moved = dataclasses.replace(plan, tasks=tasks, log_dir=directory, files=files)
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


# The launcher's record, of which `tfdist report` makes a page.


def launcher_record(log_dir: Path, member: Task | None = None) -> Record:
    """Begins the launcher's record of a job.

    Args:
        log_dir: the job's directory.
        member: the one task that is started here, if launchers elsewhere start the others: they
            may share the directory.
    """
    name = "launcher" if member is None else f"launcher-{member.type}-{member.index}"
    return Record(log_dir / f"{name}{run_record.SUFFIX}", fresh=True)


def describe_job(
    record: Record, plan: JobPlan, rows: Sequence[tuple[str, str]], timeline: str | None
) -> None:
    """Writes the first line of a launcher's record.

    Args:
        record: the record.
        plan: the plan of the job.
        rows: the table that the terminal shows.
        timeline: the file of the timeline that was asked for, if one was.
    """
    here = [each.task for each in plan.tasks]
    cluster = () if plan.cluster is None else tuple(plan.cluster.tasks())
    record.add(
        "job",
        command=["tfdist", *sys.argv[1:]],
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=versions(),
        rows=rows,
        tasks=[
            {
                "task": str(each.task),
                "log": each.log.name,
                "host": each.host,
                "trains": SERVER_MODULE not in each.command,
            }
            for each in plan.tasks
        ],
        elsewhere=[str(task) for task, _ in cluster if task not in here],
        shown=str(plan.shown),
        max_restarts=plan.max_restarts,
        timeline=None if timeline is None else str(Path(timeline).absolute()),
    )


def note_done(outcome: Outcome, log_dir: Path, begun: float, record: Record) -> int:
    """Records the end of a job and shows it to the user.

    Args:
        outcome: how the job ended.
        log_dir: the directory of its logs.
        begun: when it began, by `time.monotonic`.
        record: the launcher's record.

    Returns:
        The exit status.
    """
    record.add("done", status=outcome.status, message=outcome.message)
    if outcome.status == 0:
        took = summary.duration(time.monotonic() - begun)
        speed, files = _recorded(log_dir)
        summary.note(f"done in {took}; logs: {log_dir}{speed}", new_line=outcome.midline)
        if files:
            summary.note(f"wrote {files}")
    return summary.conclude(outcome)


def _recorded(log_dir: Path) -> tuple[str, str]:
    """The examples a second, and the files that are still there, as far as tasks noted them."""
    with contextlib.suppress(Exception):  # A job does not fail for its record.
        run = run_data.load(log_dir)
        rate = run_data.examples_a_second(run)
        written = dict.fromkeys(each for task in run.tasks for each in task.files)
        there = [os.path.relpath(each) for each in written if os.path.exists(each)]
        more = f" and {len(there) - _FILES_SHOWN} more" if len(there) > _FILES_SHOWN else ""
        return (
            "" if rate is None else f"; {rate:,.0f} examples a second",
            ", ".join(there[:_FILES_SHOWN]) + more,
        )
    return "", ""
