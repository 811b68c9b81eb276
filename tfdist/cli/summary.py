"""What `tfdist run` shows: the table at the start, the plan of a dry run, and notes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfdist.cluster.spec import Task
from tfdist.config.pipeline_options import SCHEDULES
from tfdist.config.resolution import Resolved
from tfdist.config.server_options import ON_STALE
from tfdist.config.strategy_config import StrategyConfig
from tfdist.gradients.rule import rule_from
from tfdist.launch.plan import JobPlan, TaskPlan

__all__ = ["commands", "note", "table"]

#: What the tasks of a parameter-server job do.
_PARTS = {"chief": "runs the script", "worker": "trains", "ps": "holds weights"}


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


def table(
    plan: JobPlan,
    resolved: Resolved | None,
    seed: int | None,
    gpus: tuple[str, ...],
    why: str = "",
) -> None:
    """Prints what is about to run.

    Args:
        plan: the plan.
        resolved: the configuration and where it came from; None where each task makes its own.
        seed: the job's seed; None where the chief draws it.
        gpus: the GPUs of this machine.
        why: why the plan is such.
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
    for name, value in (*rows, ("restarts", restarts), ("logs", str(plan.log_dir))):
        if value:
            grid.add_row(name, Text(value))
    console.print(grid)


def _rows(
    plan: JobPlan, resolved: Resolved, seed: int | None, gpus: tuple[str, ...]
) -> list[tuple[str, str]]:
    config = resolved.config
    if config.strategy == "pipeline":
        return _rows_of_pipeline(plan, resolved, seed)
    served = config.strategy == "parameter_server"
    why = resolved.reasons.get("strategy")
    tasks = _training(plan, served)
    each = _devices_each(plan, resolved, gpus)
    replicas = len(tasks) * each
    what = "workers" if served else "tasks"
    share = f" ({each} in each of {len(tasks)} {what})" if len(tasks) > 1 else ""
    return [
        ("strategy", f"{config.strategy} ({why})" if why else config.strategy),
        ("update mode", _mode(config)),
        ("tasks", _tasks(plan, _PARTS if served else {})),
        ("replicas", f"{replicas}{share}"),
        ("devices", _devices(plan, each, gpus, tasks)),
        ("weights", _weights(config) if served else ""),
        ("seed", _seed(config.seed, seed)),
        ("flags", _flags(resolved)),
    ]


def _rows_of_pipeline(plan: JobPlan, resolved: Resolved, seed: int | None) -> list[tuple[str, str]]:
    config = resolved.config
    why = resolved.reasons.get("strategy")
    tasks = 1 if plan.cluster is None else len(list(plan.cluster.tasks()))
    stages = f"{config.stages}" if config.stages else "as many as devices"
    virtual = f" of {config.virtual} parts each" if config.virtual > 1 else ""
    each = "4 for each device" if config.microbatches is None else f"{config.microbatches}"
    alone = f"{config.devices or config.stages or 1} of one process"
    return [
        ("strategy", f"{config.strategy} ({why})" if why else config.strategy),
        ("schedule", f"{config.schedule} ({SCHEDULES[config.schedule]})"),
        ("tasks", _tasks(plan, {"worker": "stages; the script runs on the chief"})),
        ("devices", f"those of {tasks} tasks" if tasks > 1 else alone),
        ("stages", stages + virtual),
        ("microbatches", "1" if config.schedule == "pipedream" else each),
        ("seed", _seed(config.seed, seed)),
        ("flags", _flags(resolved)),
    ]


def _flags(resolved: Resolved) -> str:
    """The flags that win over the strategy file, with what the file says."""
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


def _mode(config: StrategyConfig) -> str:
    """The update mode with its options, in words."""
    if config.strategy != "parameter_server":
        return rule_from(config).in_words
    if config.mode == "stale" and config.on_stale == "damp":
        return f"stale ({ON_STALE['damp']})"
    if config.mode == "stale":
        return (
            f"stale (no gradient is applied after more than {config.staleness} other updates: "
            f"{ON_STALE[config.on_stale]})"
        )
    if config.mode == "async":
        return "async (each worker's gradient is an update of its own)"
    if config.backup_workers:
        enough = config.processes - config.backup_workers
        return f"sync (an update takes the first {enough} of {config.processes} gradients)"
    return config.mode


def _weights(config: StrategyConfig) -> str:
    """Where the weights are and how they travel, in words."""
    most = config.ps if config.max_shards is None else config.max_shards
    parts = f"on {config.ps} parameter server{'s' if config.ps > 1 else ''}"
    if config.ps > 1 and most > 1:
        least = config.min_shard_bytes
        size = f"{least / (1 << 20):g} MiB" if least >= 1 << 20 else f"{least} bytes"
        parts += f", large ones in up to {most} parts of at least {size}"
    if config.wire_dtype != "float32":
        parts += f", sent as {config.wire_dtype}"
    return parts


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


def _devices_each(plan: JobPlan, resolved: Resolved, gpus: tuple[str, ...]) -> int:
    """Replicas in each process."""
    if resolved.config.strategy in ("single", "parameter_server"):
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
