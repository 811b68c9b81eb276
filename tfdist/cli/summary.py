"""The output of `tfdist run`: the table at the start, the plan of a dry run, and notes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfdist.cli.request import Job
from tfdist.cluster.spec import Task, Topology
from tfdist.config.gradient_options import GradientOptions
from tfdist.config.mesh import MODEL
from tfdist.config.pipeline_options import PipelineOptions
from tfdist.config.resolution import Resolved
from tfdist.config.sharding_options import MeshOptions
from tfdist.config.strategy_spec import StrategySpec, spec_of
from tfdist.launcher.plan import JobPlan, TaskPlan
from tfdist.launcher.supervisor import Outcome
from tfdist.utils.run_record import Record

__all__ = ["as_json", "commands", "conclude", "duration", "note", "noting", "table"]

#: The shell function of a dry run that gives a command the environment of all tasks.
_COMMON = "common"

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


def commands(plan: JobPlan, layouts: Mapping[str, Any] | None = None) -> str:
    """For each task of a plan its command, ready to be pasted into a shell of its own.

    The part of the environment that all of several tasks have stands once, before them, as a shell
    function that goes into each of these shells.

    Args:
        plan: the plan.
        layouts: the layouts of weights, shown as comments; None if nothing is divided.
    """
    first, *others = (each.environ for each in plan.tasks)
    common = {
        name: value
        for name, value in first.items()
        if others and all(name in each and each[name] == value for each in others)
    }
    blocks = [_command(task, common) for task in plan.tasks]
    if common:
        body = _joined([*_env(common), '"$@"'], indent=4)
        blocks.insert(0, f"# The environment of all tasks\n{_COMMON}() {{\n  {body}\n}}")
    if others and plan.cluster is not None:  # They wait for each other; an engine's are its own.
        after = f", after the function {_COMMON}" if common else ""
        blocks.insert(0, f"# Paste each task's command into a shell of its own{after}.")
    blocks += [] if layouts is None else _layouts(layouts)
    return "\n".join(blocks)


def _layouts(found: Mapping[str, Any]) -> list[str]:
    """The layouts of weights, and what the optimizer keeps, as lines of comments."""
    rows = [
        (each["path"], f"({', '.join(map(str, each['shape']))})", each["layout"], each["bytes"])
        for each in found["weights"]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    optimizer = found["optimizer"]
    state = "" if optimizer is None else f", and {optimizer:,} of the optimizer's variables"
    lines = [f"keeps {sum(row[3] for row in rows):,} bytes of {len(rows)} weights{state}:"]
    for *texts, size in rows:
        padded = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
        lines.append(f"  {'  '.join(padded)}  {size:,}")
    return [f"# {line}" for line in (f"The first process {lines[0]}", *lines[1:])]


def as_json(job: Job, layouts: Mapping[str, Any] | None = None) -> str:
    """The plan of a job for other programs, as `tfdist run --dry-run --json` prints it.

    Args:
        job: the job.
        layouts: the layouts of weights; None if nothing is divided.
    """
    plan, resolved = job.plan, job.resolved
    tasks = [
        {
            "type": each.task.type,
            "index": each.task.index,
            "address": None if each.address is None else str(each.address),
            "host": each.host,
            "command": each.command,
            "environ": each.environ,
            "log": str(each.log),
        }
        for each in plan.tasks
    ]
    content = {
        "strategy": None if resolved is None else resolved.config.strategy,
        "options": None if resolved is None else resolved.config.values(),
        "reasons": None if resolved is None else resolved.reasons,
        "seed": job.seed,
        "log_dir": str(plan.log_dir),
        "max_restarts": plan.max_restarts,
        "files": {str(path): text for path, text in plan.files.items()},
        "tasks": tasks,
        "layouts": layouts,
    }
    return json.dumps(content, indent=2)


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
    mesh = config.part(MeshOptions).parsed
    parts = 1 if mesh is None else mesh.size(MODEL)
    if parts > 1:
        share = f" (each on {parts} tasks)"
    return [
        ("replicas", f"{len(tasks) * each // parts}{share}"),
        ("devices", _devices(plan, each, gpus, tasks)),
    ]


def _flags(resolved: Resolved) -> str:
    """The flags that win over the strategy file, with the values in the file."""
    lines = [
        f"{resolved.as_set(name)} instead of the file's {value!r}"
        for name, value in resolved.overridden.items()
    ]
    lines += [f"the file's {name}={value!r} left out" for name, value in resolved.left_out.items()]
    return "\n".join(lines)


def _rows_of_every_task(plan: JobPlan, gpus: tuple[str, ...], why: str) -> list[tuple[str, str]]:
    return [
        ("strategy", f"the script's own: every task runs it{f' ({why})' if why else ''}"),
        ("tasks", _tasks(plan, {})),
        ("devices", _devices(plan, 1, gpus, _training(plan, has_servers=False)) if gpus else ""),
    ]


def _training(plan: JobPlan, has_servers: bool) -> tuple[Task, ...]:
    """The tasks that hold replicas."""
    if plan.cluster is None:
        return (plan.shown,)
    return tuple(
        task for task in plan.cluster.computing if task.type == "worker" or not has_servers
    )


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
    visible = plan.tasks[0].environ.get("CUDA_VISIBLE_DEVICES")
    return len(visible.split(",")) if visible else max(1, len(gpus))


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


def _command(task: TaskPlan, common: Mapping[str, str | None]) -> str:
    where = f" at {task.address}" if task.address is not None else ""
    own = {name: value for name, value in task.environ.items() if name not in common}
    call = _joined([*_env(own), shlex.join(task.command)])
    return f"# {task.task}{where}, log: {task.log}\n{f'{_COMMON} ' if common else ''}{call}"


def _env(environ: Mapping[str, str | None]) -> list[str]:
    """The call of `env` that changes the environment so; no words for no change."""
    removed = [f"-u {name}" for name, value in environ.items() if value is None]
    assigned = [
        f"{name}={shlex.quote(value)}"
        for name, value in sorted(environ.items())
        if value is not None
    ]
    return ["env", *removed, *assigned] if removed or assigned else []


def _joined(words: Sequence[str], indent: int = 2) -> str:
    return f" \\\n{' ' * indent}".join(words)


def _seed(seed: int | None, drawn: int | None) -> str:
    if seed is not None:
        return str(seed)
    return "drawn by the chief" if drawn is None else f"{drawn} (no --seed was given)"
