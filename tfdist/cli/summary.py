"""The output of `tfdist run`: the table at the start, the plan of a dry run, and notes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfdist.cluster.spec import Task, Topology
from tfdist.config.gradient_options import GradientOptions
from tfdist.config.pipeline_options import PipelineOptions
from tfdist.config.resolution import Resolved
from tfdist.config.strategy_spec import StrategySpec, spec_of
from tfdist.launcher.plan import JobPlan, TaskPlan
from tfdist.launcher.supervisor import Outcome
from tfdist.utils.run_record import Record

__all__ = ["commands", "conclude", "duration", "note", "noting", "table"]

#: The work of the tasks of a parameter-server job.
_PARTS = {
    Topology.SERVERS: {"chief": "runs the script", "worker": "trains", "ps": "holds weights"},
    Topology.STAGES: {"worker": "stages; the script runs on the chief"},
}


def note(text: str, new_line: bool = False) -> None:
    """Shows a note on the terminal, apart from the script's own output.

    Args:
        text: the note.
        new_line: whether to begin a new line first.
    """
    print(f"{chr(10) if new_line else ''}tfdist: {text}", file=sys.stderr, flush=True)


def noting(record: Record) -> Callable[[str, bool], None]:
    """A function that shows a note and records it as an event of the job."""

    def show(text: str, new_line: bool) -> None:
        record.add("event", text=text)
        note(text, new_line)

    return show


def conclude(outcome: Outcome) -> int:
    """Shows the user how a job ended; returns the exit status."""
    if outcome.message:
        note(outcome.message, new_line=outcome.midline)
    return outcome.status


def duration(seconds: float) -> str:
    """A time as `1 min 5 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def commands(plan: JobPlan) -> str:
    """For each task of a plan its command, ready to be pasted into a shell."""
    return "\n".join(_command(task) for task in plan.tasks)


def table(
    plan: JobPlan,
    resolved: Resolved | None,
    seed: int | None,
    gpus: tuple[str, ...],
    why: str = "",
) -> list[tuple[str, str]]:
    """Prints the job that is about to run.

    Args:
        plan: the plan.
        resolved: the configuration and where it came from; None if each task makes its own.
        seed: the job's seed; None if the chief draws it.
        gpus: the GPUs of this machine.
        why: why the plan is such.

    Returns:
        The rows of the table.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=120)
    grid = Table(show_header=False, title="tfdist run", title_justify="left")
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    rows = (
        _rows_of_every_task(plan, gpus, why)
        if resolved is None
        else _rows(plan, resolved, seed, gpus)
    )
    restarts = f"at most {plan.max_restarts}" if plan.max_restarts else ""
    rows = [row for row in (*rows, ("restarts", restarts), ("logs", str(plan.log_dir))) if row[1]]
    for name, value in rows:
        grid.add_row(name, Text(value))
    console.print(grid)
    return rows


def _rows(
    plan: JobPlan, resolved: Resolved, seed: int | None, gpus: tuple[str, ...]
) -> list[tuple[str, str]]:
    config = resolved.config
    spec = spec_of(config.strategy)
    why = resolved.reasons.get("strategy")
    described = dict(
        spec.describe(config)
        if spec.describe
        else {"update mode": config.part(GradientOptions).in_words}
    )
    first = next(iter(described))
    return [
        ("strategy", f"{config.strategy} ({why})" if why else config.strategy),
        (first, described.pop(first)),
        ("tasks", _tasks(plan, _PARTS.get(spec.topology, {}))),
        *_rows_of_devices(plan, resolved, spec, gpus),
        *described.items(),
        ("seed", _seed(config.seed, seed)),
        ("flags", _flags(resolved)),
    ]


def _rows_of_devices(
    plan: JobPlan, resolved: Resolved, spec: StrategySpec, gpus: tuple[str, ...]
) -> list[tuple[str, str]]:
    config = resolved.config
    if spec.has_stages:
        count = 1 if plan.cluster is None else len(list(plan.cluster.tasks()))
        alone = f"{config.devices or config.part(PipelineOptions).stages or 1} of one process"
        return [("devices", f"those of {count} tasks" if count > 1 else alone)]
    tasks = _training(plan, spec.has_servers)
    each = _devices_each(plan, resolved, spec, gpus)
    what = "workers" if spec.has_servers else "tasks"
    share = f" ({each} in each of {len(tasks)} {what})" if len(tasks) > 1 else ""
    return [
        ("replicas", f"{len(tasks) * each}{share}"),
        ("devices", _devices(plan, each, gpus, tasks)),
    ]


def _flags(resolved: Resolved) -> str:
    """The flags that win over the strategy file, with the values in the file."""
    return "\n".join(
        f"{resolved.said(name)} instead of the file's {value!r}"
        for name, value in resolved.overridden.items()
    )


def _rows_of_every_task(plan: JobPlan, gpus: tuple[str, ...], why: str) -> list[tuple[str, str]]:
    return [
        ("strategy", f"the script's own: every task runs it{f' ({why})' if why else ''}"),
        ("tasks", _tasks(plan, {})),
        ("devices", _devices(plan, 1, gpus, _training(plan, served=False)) if gpus else ""),
    ]


def _training(plan: JobPlan, served: bool) -> tuple[Task, ...]:
    """The tasks that hold replicas."""
    if plan.cluster is None:
        return (plan.shown,)
    return tuple(task for task in plan.cluster.computing if task.type == "worker" or not served)


def _tasks(plan: JobPlan, parts: Mapping[str, str]) -> str:
    if plan.cluster is None:
        return "one process"
    here = {each.task for each in plan.tasks}
    lines = []
    for task, address in plan.cluster.tasks():
        role = " (chief)" if task in plan.cluster.computing[:1] else ""
        role = f" ({parts[task.type]})" if task.type in parts else role
        only = " (this one)" if task in here and len(plan.tasks) == 1 else ""
        lines.append(f"{task} at {address}{role}{only}")
    return "\n".join(lines)


def _devices_each(
    plan: JobPlan, resolved: Resolved, spec: StrategySpec, gpus: tuple[str, ...]
) -> int:
    """Replicas in each process."""
    if spec.one_device:
        return 1
    if resolved.config.devices is not None:
        return resolved.config.devices
    given = plan.tasks[0].environ.get("CUDA_VISIBLE_DEVICES")
    return len(given.split(",")) if given else max(1, len(gpus))


def _devices(plan: JobPlan, each: int, gpus: tuple[str, ...], training: tuple[Task, ...]) -> str:
    if not gpus:
        kind = "the CPU" if each == 1 else f"{each} logical devices of the CPU"
        return kind + (" in each process" if len(plan.tasks) > 1 else "")
    if len(plan.tasks) == 1:
        return f"GPU {', '.join(gpus[:each])}" if plan.tasks[0].task in training else "no GPU"
    parts = [
        f"{t.task}: GPU {t.environ.get('CUDA_VISIBLE_DEVICES') or ', '.join(gpus)}"
        for t in plan.tasks
        if t.task in training
    ]
    return "\n".join(parts)


def _command(task: TaskPlan) -> str:
    where = f" at {task.address}" if task.address is not None else ""
    removed = [f"-u {name}" for name, value in task.environ.items() if value is None]
    given = [
        f"{name}={shlex.quote(value)}"
        for name, value in sorted(task.environ.items())
        if value is not None
    ]
    prefix = ["env", *removed, *given] if removed or given else []
    words = [*prefix, shlex.join(task.command)]
    return f"# {task.task}{where}, log: {task.log}\n" + " \\\n  ".join(words)


def _seed(given: int | None, drawn: int | None) -> str:
    if given is not None:
        return str(given)
    return "drawn by the chief" if drawn is None else f"{drawn} (no --seed was given)"
