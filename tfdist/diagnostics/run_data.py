"""Reads the records of a run: those of its launcher and of its tasks, in one directory."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tfdist.config.strategy_spec import StrategySpec, having, specs
from tfdist.errors import ConfigError
from tfdist.launcher.elastic_directory import RESUME_STATUS
from tfdist.utils import run_record

__all__ = [
    "STEP_PARTS",
    "End",
    "Epoch",
    "Event",
    "Run",
    "Sample",
    "TaskRun",
    "clean",
    "examples_a_second",
    "load",
    "pace",
]

#: The step and its parts that `--report` measures, by their names in the logs.
STEP_PARTS = ("step_ms", "input_ms", "compute_ms", "exchange_waited_ms", "exchange_hidden_ms")

#: Logs that are not metrics of the model.
_NOT_METRICS = {
    *STEP_PARTS,
    "sent_bytes_per_step",
    *("gradients_dropped", "updates_per_second", "staleness_mean", "staleness_max"),
}

#: Characters that an XML document, and so a picture within a page, cannot have.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some steps in a row of one task.

    Attributes:
        at: when they ended, in seconds from the beginning of the job.
        attempt: how often the task had been started before.
        fit: the number of the `fit`, from 0.
        epoch: the number of the epoch, from 0.
        steps: how many they are.
        seconds: how long they took together.
        batch: the examples of a step, if that is known.
        first: whether this is the first step of a `fit`, which includes the tracing.
        logs: the metrics after them.
        parts: milliseconds of the parts of their mean step, if `--report` has measured them.
    """

    at: float
    attempt: int
    fit: int
    epoch: int
    steps: int
    seconds: float
    batch: int | None
    first: bool
    logs: dict[str, float]
    parts: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        """The mean time of a step in milliseconds; NaN without steps."""
        return 1e3 * self.seconds / self.steps if self.steps else math.nan

    @property
    def rate(self) -> float:
        """Steps a second; NaN if it is unknown."""
        return self.steps / self.seconds if self.seconds > 0 else math.nan


#: A whole epoch.
Epoch = Sample


@dataclasses.dataclass(frozen=True)
class End:
    """The end of a task.

    Attributes:
        at: when it was noticed, in seconds from the beginning of the job.
        status: the exit status, negative for a signal.
        stopped: whether the launcher stopped it.
        words: the launcher's description of a failure.
        peak_rss: the largest resident memory in bytes, if it is known.
    """

    at: float
    status: int
    stopped: bool
    words: str
    peak_rss: int | None

    @property
    def failed(self) -> bool:
        """Whether the task failed of itself."""
        return self.status not in (0, RESUME_STATUS) and not self.stopped

    @property
    def in_words(self) -> str:
        """The way the task ended."""
        if self.stopped:
            return "stopped by the launcher"
        if self.status == RESUME_STATUS:
            return f"left its state for the next start (exit status {RESUME_STATUS})"
        return self.words or "ended well"


@dataclasses.dataclass
class TaskRun:
    """The record of a task.

    Attributes:
        name: the task, such as `worker 0`.
        log: its log file, which may not be there.
        host: the machine to which the launcher sent it, if that was another.
        trains: whether it runs the script, and so has a record of its own.
        recorded: whether that record is here.
        abouts: a description of its process for each start.
        windows: its steps, in pieces of about a second.
        epochs: its epochs.
        files: the models and weights that it has written, by their paths.
        server_epochs: for each epoch on parameter servers the updates that they made.
        starts: when the launcher started it, in seconds from the beginning of the job.
        ends: its ends.
        peak_rss: the largest resident memory in bytes, as far as it is known.
    """

    name: str
    log: Path
    host: str | None = None
    trains: bool = True
    recorded: bool = False
    abouts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    windows: list[Sample] = dataclasses.field(default_factory=list)
    epochs: list[Epoch] = dataclasses.field(default_factory=list)
    files: list[str] = dataclasses.field(default_factory=list)
    server_epochs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    starts: list[float] = dataclasses.field(default_factory=list)
    ends: list[End] = dataclasses.field(default_factory=list)
    peak_rss: int | None = None

    @property
    def failed(self) -> bool:
        """Whether its last end was a failure of its own."""
        return bool(self.ends) and self.ends[-1].failed

    @property
    def samples(self) -> list[Sample]:
        """Its steps over time: in pieces of a second, or whole epochs if these are shorter."""
        later = [each for each in self.windows if not each.first]
        return later if len(later) >= len(self.epochs) else self.epochs


@dataclasses.dataclass(frozen=True)
class Event:
    """A sentence of the launcher, and when it was shown."""

    at: float
    text: str


@dataclasses.dataclass
class Run:
    """The records of a run.

    Attributes:
        directory: where they are.
        job: the launcher's description of the job.
        begun: when it began, in seconds since 1970.
        seconds: how long it took, or has run so far.
        state: `done`, `failed`, `running`, or `lost` if the launcher has gone without an end.
        status: the exit status; None before the end.
        message: the launcher's message at the end.
        tasks: the tasks, in the launcher's order.
        events: restarts and other events.
        elsewhere: tasks that other launchers started, with records in other directories.
        lacks: sentences about the data that is missing.
    """

    directory: Path
    job: dict[str, Any]
    begun: float
    seconds: float = 0.0
    state: str = "running"
    status: int | None = None
    message: str = ""
    tasks: list[TaskRun] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)
    elsewhere: list[str] = dataclasses.field(default_factory=list)
    lacks: list[str] = dataclasses.field(default_factory=list)

    @property
    def chief(self) -> TaskRun | None:
        """The task whose metrics are shown, the one that the terminal shows if it has any."""
        recorded = [task for task in self.tasks if task.windows or task.epochs]
        shown = [task for task in recorded if task.name == self.job.get("shown")]
        return next(iter((*shown, *recorded)), None)

    @property
    def epochs(self) -> list[Epoch]:
        """The epochs of the chief, each as it was trained last."""
        epochs = self.chief.epochs if self.chief else []
        return list({(each.fit, each.epoch): each for each in epochs}.values())

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, the loss first, without those of the validation."""
        samples = (*self.chief.windows, *self.chief.epochs) if self.chief else ()
        names = dict.fromkeys(name for each in samples for name in each.logs)
        own = dict.fromkeys(n.removeprefix("val_") for n in names if n not in _NOT_METRICS)
        return sorted(own, key=lambda name: name != "loss")

    def row(self, name: str) -> str:
        """A row of the table that `tfdist run` shows; nothing if it has none of this name."""
        return next((str(value) for key, value in self.job.get("rows", ()) if key == name), "")

    @property
    def strategy(self) -> str:
        """The name of the strategy; words if the script makes its own."""
        return self.row("strategy").partition(" (")[0]

    @property
    def spec(self) -> StrategySpec | None:
        """The description of the strategy; None if it is not known here."""
        return specs().get(self.strategy)

    @property
    def timeline(self) -> Path | None:
        """The file of a timeline, if one was recorded since the job began."""
        path = Path(self.job["timeline"]) if self.job.get("timeline") else None
        recorded = path is not None and path.is_file() and path.stat().st_mtime >= self.begun
        return path if recorded else None

    @property
    def restarts(self) -> int:
        """The number of times a task was started again, or all were."""
        return max((len(task.starts) - 1 for task in self.tasks if task.starts), default=0)


def pace(task: TaskRun) -> tuple[int, float]:
    """The steps of a task and the seconds that they took, without the first step of each `fit`."""
    first = [each for each in task.windows if each.first]
    if not task.epochs:
        later = [each for each in task.windows if not each.first]
        return sum(each.steps for each in later), sum(each.seconds for each in later)
    whole = {(each.attempt, each.fit, each.epoch) for each in task.epochs}
    first = [each for each in first if (each.attempt, each.fit, each.epoch) in whole]
    steps = sum(each.steps for each in task.epochs) - sum(each.steps for each in first)
    seconds = sum(each.seconds for each in task.epochs) - sum(each.seconds for each in first)
    return max(steps, 0), max(seconds, 0.0)


def examples_a_second(run: Run) -> float | None:
    """The mean rate of the whole training without first steps; None if it is unknown."""
    steps, seconds = pace(run.chief) if run.chief else (0, 0.0)
    samples = run.chief.samples if run.chief else []
    batch = samples[-1].batch if samples else None
    return steps * batch / seconds if batch and steps and seconds else None


def load(directory: Path) -> Run:
    """Reads the records of a run.

    Raises:
        ConfigError: if there are none.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"There is no directory {str(directory)!r}. Give the log directory of a run, as "
            "`tfdist run` shows it: tfdist-logs/latest is the last one that was begun here."
        )
    launchers = [_read(path) for path in sorted(directory.glob(f"launcher*{run_record.SUFFIX}"))]
    launchers = [each for each in launchers if any(entry["kind"] == "job" for entry in each)]
    if not launchers:
        raise ConfigError(
            f"{str(directory)!r} has no record of a run (launcher{run_record.SUFFIX}). Give "
            "the log directory of a job that this version of `tfdist run` started on this machine."
        )
    jobs = [_last(each, "job") for each in launchers]
    run = Run(directory, jobs[0], min(job["t"] for job in jobs))
    for job, entries in zip(jobs, launchers, strict=True):
        _add_launcher(run, job, entries)
    for task in run.tasks:
        _add_record(run, task)
    _conclude(run, jobs, launchers)
    here = {task.name for task in run.tasks}
    run.elsewhere = sorted({name for job in jobs for name in job.get("elsewhere", ())} - here)
    run.lacks = [*_lacks(run), *_absent(run)]
    return run


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return run_record.read(path)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}.") from error


def _last(entries: Iterable[dict[str, Any]], kind: str) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for entry in entries:
        last = entry if entry["kind"] == kind else last
    return last


def _add_launcher(run: Run, job: dict[str, Any], entries: Sequence[dict[str, Any]]) -> None:
    """Adds the tasks of one launcher, their ends, and its events."""
    for each in job.get("tasks", ()):
        log = run.directory / Path(each["log"]).name
        run.tasks.append(TaskRun(each["task"], log, each.get("host"), each.get("trains", True)))
    by_name = {task.name: task for task in run.tasks}
    for entry in entries:
        name = entry.get("task", "")
        if entry["kind"] in ("start", "end") and name not in by_name:  # An elastic job has grown.
            kind, _, index = name.rpartition(" ")
            by_name[name] = TaskRun(name, run.directory / f"{kind}-{index}.log")
            run.tasks.append(by_name[name])
        at = entry["t"] - run.begun
        if entry["kind"] == "event":
            run.events.append(Event(at, clean(entry.get("text", ""))))
        if entry["kind"] == "start":
            by_name[name].starts.append(at)
        if entry["kind"] == "end":
            task, peak = by_name[name], entry.get("peak_rss")
            end = End(at, entry["returncode"], entry["stopped"], clean(entry["words"]), peak)
            task.ends.append(end)
            task.peak_rss = max(filter(None, (task.peak_rss, peak)), default=None)


def _add_record(run: Run, task: TaskRun) -> None:
    """Adds the record of a task. Lines from before the job are those of an earlier one."""
    path = task.log.with_suffix(run_record.SUFFIX)
    if not path.is_file():
        return
    for entry in _read(path):
        if entry["t"] < run.begun:
            continue
        task.recorded = True
        if entry["kind"] == "task":
            task.abouts.append(entry)
        elif entry["kind"] == "served":
            task.server_epochs.append(entry)
        elif entry["kind"] == "file":
            task.files.append(entry["path"])
        elif entry["kind"] in ("steps", "epoch"):
            sample = _sample(entry, run.begun, max(len(task.abouts) - 1, 0))
            (task.windows if entry["kind"] == "steps" else task.epochs).append(sample)
            peaks = filter(None, (task.peak_rss, entry.get("peak_rss")))
            task.peak_rss = max(peaks, default=None)


def _sample(entry: dict[str, Any], begun: float, attempt: int) -> Sample:
    logs = entry.get("logs", {})
    return Sample(
        at=entry["t"] - begun,
        attempt=attempt,
        fit=entry.get("fit", 0),
        epoch=entry.get("epoch", 0),
        steps=entry.get("steps", 0),
        seconds=entry.get("seconds", 0.0),
        batch=entry.get("batch"),
        first=entry.get("first", False),
        logs={clean(name): value for name, value in logs.items()},
        parts=entry.get("parts") or {name: logs[name] for name in STEP_PARTS if name in logs},
    )


def clean(text: str) -> str:
    """A text without the characters that a page cannot have."""
    return _CONTROL.sub("\ufffd", text)


def _conclude(
    run: Run, jobs: Sequence[dict[str, Any]], launchers: Sequence[list[dict[str, Any]]]
) -> None:
    """Sets the state of a run, and how long it took."""
    ends = [_last(each, "done") for each in launchers]
    failed = [end for end in ends if end and end["status"] != 0]
    times = [task.at for each in run.tasks for task in (*each.windows, *each.epochs)]
    run.seconds = max([*times, *(each[-1]["t"] - run.begun for each in launchers)])
    if failed:
        run.state, run.status = "failed", failed[0]["status"]
        run.message = clean(failed[0].get("message", ""))
    elif all(ends):
        run.state, run.status = "done", 0
    elif any(_has_gone(job) for job, end in zip(jobs, ends, strict=True) if not end):
        run.state = "lost"
    else:
        run.seconds = max(run.seconds, time.time() - run.begun)


def _has_gone(job: dict[str, Any]) -> bool:
    """Whether a launcher of this machine does not run any more."""
    if job.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(job["pid"]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _lacks(run: Run) -> Iterable[str]:
    """Sentences about the data that is missing."""
    for task in run.tasks:
        name = task.log.with_suffix(run_record.SUFFIX).name
        if task.host is not None and task.peak_rss is None:
            yield f"Memory of {task.name}: it ran on {task.host}, where nobody looked."
        if not task.trains or task.recorded:
            continue
        if task.host is not None:
            yield (
                f"Steps of {task.name}: it ran on {task.host}, and its record {name} is in the "
                "same directory there. Copy it here and make the page again."
            )
        else:
            yield (
                f"Steps of {task.name}: there is no record {name}. Either the task has not begun "
                "to train, or it runs without a strategy of tfdist (--env-only, --every-task)."
            )
    if run.elsewhere:
        names = ", ".join(run.elsewhere)
        yield f"All of {names}: other launchers started them, with other directories."
    samples = run.chief.samples if run.chief else []
    if samples and all(each.batch is None for each in samples):
        yield "Examples a second: the data set does not show the size of its batches."
    unknown = [task.name for task in run.tasks if task.host is None and task.peak_rss is None]
    if unknown and run.state == "running":
        yield f"Memory of {', '.join(unknown)}: it is known once they train, or have ended."


def _absent(run: Run) -> Iterable[str]:
    """Sentences about sections that a page of this strategy does not have."""
    spec = run.spec
    if spec is None or run.chief is None:
        return
    if not any(sum(each.get("staleness", ())) for each in run.chief.server_epochs):
        servers = " and ".join(having(lambda each: each.has_servers))
        yield f"Staleness: it is counted on {servers}, at the end of each epoch."
    if run.timeline is not None:
        return
    if run.job.get("timeline"):
        yield f"Timeline: {run.job['timeline']} has not been written."
    elif spec.has_option("timeline"):
        yield "Timeline: none was asked for. Run the job with --timeline FILE."
    else:
        others = " and ".join(having(lambda each: each.has_option("timeline")))
        yield f"Timeline: {spec.name} records none. --timeline is an option of {others}."
