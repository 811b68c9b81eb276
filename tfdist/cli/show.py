"""What `tfdist run` shows: the table at the start, the plan of a dry run, and notes."""

from __future__ import annotations

import shlex
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfdist.cluster.launch.plan import JobPlan, TaskPlan
from tfdist.config import Resolved

__all__ = ["commands", "note", "split_batch", "table"]

_BATCH = 64
_LISTED = 8


def note(text: str, new_line: bool = False) -> None:
    """Tells the user something on the terminal, apart from the script's own output.

    Args:
        text: what to tell.
        new_line: whether to begin a new line first.
    """
    print(f"{chr(10) if new_line else ''}tfdist: {text}", file=sys.stderr, flush=True)


def commands(plan: JobPlan) -> str:
    """For each task of a plan its command, ready to be pasted into a shell."""
    return "\n".join(_command(task) for task in plan.tasks)


def table(plan: JobPlan, resolved: Resolved, seed: int | None, gpus: tuple[str, ...]) -> None:
    """Prints what is about to run.

    Args:
        plan: the plan.
        resolved: the configuration and where it came from.
        seed: the job's seed; None where the chief draws it.
        gpus: the GPUs of this machine.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=120)
    grid = Table(show_header=False, title="tfdist run", title_justify="left")
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _rows(plan, resolved, seed, gpus):
        grid.add_row(name, Text(value))
    console.print(grid)


def split_batch(batch: int, replicas: int) -> str:
    """How a global batch is spread over replicas, in words: sizes differ by one at most."""
    if replicas == 1:
        return f"batch_size={batch} → {batch} examples a step"
    each, more = divmod(batch, replicas)
    sizes = [each + (number < more) for number in range(replicas)]
    if replicas <= _LISTED:
        parts = " + ".join(map(str, sizes))
    else:
        parts = f"{each} or {each + 1} on each" if more else f"{each} on each of {replicas}"
    return f"batch_size={batch} → {parts} examples a step"


def _rows(
    plan: JobPlan, resolved: Resolved, seed: int | None, gpus: tuple[str, ...]
) -> list[tuple[str, str]]:
    config = resolved.config
    why = resolved.reasons.get("strategy")
    tasks = plan.cluster.computing if plan.cluster is not None else (plan.shown,)
    each = _devices_each(plan, resolved, gpus)
    replicas = len(tasks) * each
    share = f" ({each} in each of {len(tasks)} tasks)" if len(tasks) > 1 else ""
    rows = [
        ("strategy", f"{config.strategy} ({why})" if why else config.strategy),
        ("update mode", config.mode),
        ("tasks", _tasks(plan)),
        ("replicas", f"{replicas}{share}"),
        ("devices", _devices(plan, each, gpus)),
        ("global batch", split_batch(max(_BATCH, replicas), replicas)),
        ("seed", _seed(config.seed, seed)),
        ("logs", str(plan.log_dir)),
    ]
    return [row for row in rows if row[1]]


def _tasks(plan: JobPlan) -> str:
    if plan.cluster is None:
        return "one process"
    here = {each.task for each in plan.tasks}
    lines = []
    for task, address in plan.cluster.tasks():
        role = " (chief)" if task == plan.cluster.chief else ""
        only = " (this one)" if task in here and len(plan.tasks) == 1 else ""
        lines.append(f"{task} at {address}{role}{only}")
    return "\n".join(lines)


def _devices_each(plan: JobPlan, resolved: Resolved, gpus: tuple[str, ...]) -> int:
    """Replicas in each process."""
    if resolved.config.strategy == "single":
        return 1
    if resolved.config.devices is not None:
        return resolved.config.devices
    given = plan.tasks[0].environ.get("CUDA_VISIBLE_DEVICES")
    return len(given.split(",")) if given else max(1, len(gpus))


def _devices(plan: JobPlan, each: int, gpus: tuple[str, ...]) -> str:
    if not gpus:
        kind = "the CPU" if each == 1 else f"{each} logical devices of the CPU"
        return kind + (" in each process" if len(plan.tasks) > 1 else "")
    if len(plan.tasks) == 1:
        return f"GPU {', '.join(gpus[:each])}"
    parts = [f"{t.task}: GPU {t.environ.get('CUDA_VISIBLE_DEVICES')}" for t in plan.tasks]
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
