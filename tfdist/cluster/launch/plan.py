"""What a launch will do, as data: printed by `--dry-run`, tested without a process.

Planning is apart from spawning, so that other launchers (ssh, Slurm) can reuse the plan.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.cluster import gpus as gpu_lists
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = ["JobPlan", "Program", "TaskPlan", "local_cluster", "plan_local", "plan_member"]

#: Where tasks of this machine listen. An address, so that no name lookup can fail.
LOCAL_HOST = "127.0.0.1"

#: The module that joins the cluster, enters the strategy's scope and runs the script.
TASK_MODULE = "tfdist.cli.task"

#: Set in a task unless the user set them: quiet and complete logs, GPUs that can be shared.
_DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What every task runs.

    Attributes:
        script: the user's Python script.
        args: its arguments.
        config: the strategy configuration as JSON; goes to the tasks as TFDIST_CONFIG.
        seed: the one seed of the job; goes to the tasks as TFDIST_SEED. None where the tasks get
            the chief's when they join.
        env_only: whether the script builds its own strategy from TF_CONFIG: it then is run by
            itself, and besides TF_CONFIG only its output is made unbuffered.
        python: the interpreter.
    """

    script: str
    config: str
    seed: int | None
    args: tuple[str, ...] = ()
    env_only: bool = False
    python: str = sys.executable

    @property
    def command(self) -> tuple[str, ...]:
        """The command of each task."""
        runner = () if self.env_only else ("-m", TASK_MODULE)
        return (self.python, *runner, self.script, *self.args)

    def environ(self, base: Mapping[str, str]) -> dict[str, str | None]:
        """The changes to the environment that all tasks share.

        Args:
            base: the environment that the changes are made to; what the user set there is kept.
        """
        changes: dict[str, str | None] = {
            name: value for name, value in _DEFAULTS.items() if name not in base
        }
        if self.env_only:
            return {name: changes[name] for name in changes if name == "PYTHONUNBUFFERED"}
        changes.update(TFDIST_CONFIG=self.config, TFDIST_LAUNCHED="1")
        if self.seed is not None:
            changes["TFDIST_SEED"] = str(self.seed)
        return changes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """How one task is started.

    Attributes:
        task: which task it is.
        address: where it listens; None for a process that is no part of a cluster.
        command: the program and its arguments, never for a shell.
        environ: what is changed in its environment; None removes a variable.
        log: the file that gets its output.
    """

    task: Task
    address: Address | None
    command: tuple[str, ...]
    environ: Mapping[str, str | None]
    log: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPlan:
    """How all tasks of this machine are started.

    Attributes:
        tasks: the tasks to start here, in the order of their ranks.
        cluster: all tasks of the job, also those of other machines; None where a single process
            needs no cluster.
        shown: the task whose output the terminal shows.
        log_dir: the directory of the log files.
    """

    tasks: tuple[TaskPlan, ...]
    cluster: ClusterSpec | None
    shown: Task
    log_dir: Path


def local_cluster(ports: Sequence[int]) -> ClusterSpec:
    """A cluster of workers on this machine, one for each port."""
    return ClusterSpec({"worker": tuple(Address(LOCAL_HOST, port) for port in ports)})


def plan_local(
    program: Program,
    *,
    cluster: ClusterSpec | None,
    log_dir: Path,
    environ: Mapping[str, str],
    gpus: tuple[str, ...] = (),
    devices: int | None = None,
) -> JobPlan:
    """Plans a job whose tasks all run on this machine. Pure: starts and reads nothing.

    Args:
        program: what to run.
        cluster: the tasks; None for one process, which then gets no TF_CONFIG.
        log_dir: where the log files go.
        environ: the environment that the tasks' own is made from.
        gpus: the GPUs to spread over the tasks.
        devices: the GPUs that each task asks for.

    Raises:
        ConfigError: if there are GPUs, but too few.
    """
    if cluster is None:
        alone = Task("worker", 0)
        only = _task_plan(program, None, alone, log_dir, environ, ())
        return JobPlan(tasks=(only,), cluster=None, shown=alone, log_dir=log_dir)
    places = list(cluster.tasks())
    computing = len(cluster.computing)
    shares = gpu_lists.split(gpus, computing, devices) if computing > 1 else [()]
    given = dict(zip(cluster.computing, shares, strict=True))
    tasks = tuple(
        _task_plan(program, cluster, task, log_dir, environ, given.get(task, ()))
        for task, _ in places
    )
    return JobPlan(tasks=tasks, cluster=cluster, shown=cluster.chief, log_dir=log_dir)


def plan_member(
    program: Program,
    *,
    cluster: ClusterSpec,
    task: Task,
    log_dir: Path,
    environ: Mapping[str, str],
) -> JobPlan:
    """Plans one task of a cluster whose other tasks are started elsewhere.

    Args:
        program: what to run.
        cluster: all tasks, as TF_CONFIG lists them.
        task: the task to start here, as TF_CONFIG names it.
        log_dir: where the log file goes.
        environ: the environment that the task's own is made from. Its TF_CONFIG is kept.

    Raises:
        ConfigError: if the cluster has no such task.
    """
    try:
        address = cluster.address(task)
    except KeyError:
        have = ", ".join(str(other) for other, _ in cluster.tasks())
        raise ConfigError(
            f"TF_CONFIG says that this is task {str(task)!r}, but its cluster has: {have}. "
            "Correct the type and index of its task."
        ) from None
    plan = TaskPlan(
        task=task,
        address=address,
        command=program.command,
        environ=program.environ(environ),
        log=log_dir / _log_name(task),
    )
    return JobPlan(tasks=(plan,), cluster=cluster, shown=task, log_dir=log_dir)


def _task_plan(
    program: Program,
    cluster: ClusterSpec | None,
    task: Task,
    log_dir: Path,
    environ: Mapping[str, str],
    gpus: tuple[str, ...],
) -> TaskPlan:
    changes = program.environ(environ)
    if cluster is not None:
        changes["TF_CONFIG"] = cluster.tf_config(task)
    elif "TF_CONFIG" in environ:
        changes["TF_CONFIG"] = None
    if gpus:
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return TaskPlan(
        task=task,
        address=None if cluster is None else cluster.address(task),
        command=program.command,
        environ=changes,
        log=log_dir / _log_name(task),
    )


def _log_name(task: Task) -> str:
    return f"{task.type}-{task.index}.log"
