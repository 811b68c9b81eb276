"""What a launch will do, as data: printed by `--dry-run`, tested without a process.

Planning is apart from spawning, so that other launchers (ssh, Slurm) can reuse the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfdist.cluster import gpus as gpu_lists
from tfdist.cluster.launch.program import Program, Role
from tfdist.cluster.listing import Placing
from tfdist.cluster.ranks import on_hosts
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = [
    "JobPlan",
    "TaskPlan",
    "local_cluster",
    "places_on_hosts",
    "placing_for",
    "plan_local",
    "plan_member",
    "task_plan",
    "training",
]

#: Where tasks of this machine listen. An address, so that no name lookup can fail.
LOCAL_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """How one task is started.

    Attributes:
        task: which task it is.
        address: where it listens; None for a process that is no part of a cluster.
        command: the program and its arguments, never for a shell.
        environ: what is changed in its environment; None removes a variable.
        log: the file that gets its output.
        role: what its end means for the job.
        host: the machine on which it runs, if it is another: the command is then ssh's.
        order: makes what the command reads from its standard input, which stays open after that.
            None leaves standard input alone.
    """

    task: Task
    address: Address | None
    command: tuple[str, ...]
    environ: Mapping[str, str | None]
    log: Path
    role: Role = Role.MAIN
    host: str | None = None
    order: Callable[[], bytes] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPlan:
    """How all tasks of this machine are started.

    Attributes:
        tasks: the tasks to start here, in the order of their ranks.
        cluster: all tasks of the job, also those of other machines; None where a single process
            needs no cluster.
        shown: the task whose output the terminal shows.
        log_dir: the directory of the log files.
        max_restarts: how often, in all, what has failed is started again: a spare task in its
            place, or else the whole job.
        begins_at: where TensorFlow listens as soon as the job has begun. A spare task that fails
            before ends the job: the others wait for it. None where that makes no difference.
        settle: seconds that the others have to end by themselves after the first has failed. None
            means as many as it takes to tell the cause from its consequences.
        files: texts that must be there before the tasks start, by their paths in `log_dir`.
    """

    tasks: tuple[TaskPlan, ...]
    cluster: ClusterSpec | None
    shown: Task
    log_dir: Path
    max_restarts: int = 0
    begins_at: Address | None = None
    settle: float | None = None
    files: Mapping[Path, str] = dataclasses.field(default_factory=dict)


def local_cluster(
    ports: Sequence[int], *, chief: bool = False, ps: int = 0, evaluator: bool = False
) -> ClusterSpec:
    """A cluster of this machine, one task for each port: workers unless said otherwise.

    Args:
        ports: where the tasks listen, in the order of `ClusterSpec.tasks`.
        chief: whether the first is a task of type chief.
        ps: how many of the last are parameter servers.
        evaluator: whether one more, after these, is an evaluator.
    """
    addresses = tuple(Address(LOCAL_HOST, port) for port in ports)
    first, end = int(chief), len(addresses) - int(evaluator)
    last = end - ps
    return ClusterSpec(
        {
            "chief": addresses[:first],
            "worker": addresses[first:last],
            "ps": addresses[last:end],
            "evaluator": addresses[end:],
        }
    )


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
        only = task_plan(program, None, alone, log_dir, environ, None)
        return JobPlan(tasks=(only,), cluster=None, shown=alone, log_dir=log_dir)
    shares = _shares(program, cluster, gpus, devices)
    placing = placing_for(program, cluster, log_dir)
    tasks = tuple(
        task_plan(program, cluster, task, log_dir, environ, shares.get(task), placing)
        for task, _ in cluster.tasks()
    )
    spare = Role.SPARE in program.roles.values() and not program.env_only
    return JobPlan(
        tasks=tasks,
        cluster=cluster,
        shown=cluster.chief,
        log_dir=log_dir,
        begins_at=cluster.address(cluster.chief) if spare else None,
        files=placing.files,
    )


def plan_member(
    program: Program,
    *,
    cluster: ClusterSpec,
    task: Task,
    log_dir: Path,
    environ: Mapping[str, str],
    gpus: tuple[str, ...] = (),
    gpus_each: int | None = None,
) -> JobPlan:
    """Plans one task of a cluster whose other tasks are started elsewhere.

    Args:
        program: what to run.
        cluster: all tasks, as TF_CONFIG lists them.
        task: the task to start here, as TF_CONFIG names it.
        log_dir: where the log file goes.
        environ: the environment that the task's own is made from. Its TF_CONFIG is kept.
        gpus: the GPUs that this process sees; a task that does not train gets none, and tasks of
            one machine that see the same ones get a part each.
        gpus_each: the GPUs that each task has by its scheduler, where that says it.

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
    placing = placing_for(program, cluster, log_dir)
    changes = program.environ(environ)
    if placing.files:
        changes.update(placing.changes(task))
    elif "TF_CONFIG" in environ:  # Perhaps not yet in the environment of this process.
        changes["TF_CONFIG"] = environ["TF_CONFIG"]
    own = _own_gpus(program, cluster, task, gpus, gpus_each, "CUDA_VISIBLE_DEVICES" in environ)
    if own is not None:
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    plan = TaskPlan(
        task=task,
        address=address,
        command=program.command(task, cluster),
        environ=changes,
        log=log_dir / _log_name(task),
    )
    return JobPlan(tasks=(plan,), cluster=cluster, shown=task, log_dir=log_dir, files=placing.files)


def _own_gpus(
    program: Program,
    cluster: ClusterSpec,
    task: Task,
    gpus: tuple[str, ...],
    each: int | None,
    chosen: bool,
) -> tuple[str, ...] | None:
    """The GPUs of a task beside others of its host; None leaves it what it sees."""
    if not gpus:
        return None
    place = places_on_hosts(program, cluster).get(task)
    return () if place is None else gpu_lists.of_member(gpus, place, each, chosen=chosen)


def places_on_hosts(program: Program, cluster: ClusterSpec) -> dict[Task, tuple[int, int]]:
    """For each task that trains its number among those of its host, and how many these are."""
    trains = training(program, cluster)
    hosts = [cluster.address(task).host for task in trains]
    return dict(zip(trains, on_hosts(hosts), strict=True))


def placing_for(program: Program, cluster: ClusterSpec, log_dir: Path) -> Placing:
    """How the tasks of a program are told their place.

    Raises:
        ConfigError: if the cluster needs a file, and the script reads TF_CONFIG itself.
    """
    placing = Placing(cluster, log_dir)
    if placing.files and program.env_only:
        raise ConfigError(
            f"The TF_CONFIG of this cluster of {len(list(cluster.tasks()))} tasks is longer than a "
            "variable may be on Linux (128 KiB), and the script reads it itself (--env-only, "
            "--every-task). Run it under a strategy of tfdist, or on fewer tasks."
        )
    return placing


def task_plan(
    program: Program,
    cluster: ClusterSpec | None,
    task: Task,
    log_dir: Path,
    environ: Mapping[str, str],
    gpus: tuple[str, ...] | None,
    placing: Placing | None = None,
) -> TaskPlan:
    """Plans one task; see `plan_local`. `gpus` are those that it sees; None means all."""
    changes = program.environ(environ)
    if cluster is not None:
        changes.update((placing or Placing(cluster, log_dir)).changes(task))
    elif "TF_CONFIG" in environ:
        changes["TF_CONFIG"] = None
    if gpus is not None:
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return TaskPlan(
        task=task,
        address=None if cluster is None else cluster.address(task),
        command=program.command(task, cluster),
        environ=changes,
        log=log_dir / _log_name(task),
        role=program.role(task),
    )


def training(program: Program, cluster: ClusterSpec) -> tuple[Task, ...]:
    """The tasks that hold replicas: where the chief is served, it holds none."""
    served = Role.SPARE in program.roles.values()
    return tuple(task for task in cluster.computing if task.type == "worker" or not served)


def _shares(
    program: Program, cluster: ClusterSpec, gpus: tuple[str, ...], devices: int | None
) -> dict[Task, tuple[str, ...]]:
    """The GPUs of each task. A task that is not named sees what there is."""
    if not gpus:
        return {}
    trains = training(program, cluster)
    given: dict[Task, tuple[str, ...]] = {
        task: () for task, _ in cluster.tasks() if task not in trains
    }
    if len(trains) > 1 or devices is not None:
        shares = gpu_lists.split(gpus, len(trains), devices)
        given.update(zip(trains, shares, strict=True))
    return given


def _log_name(task: Task) -> str:
    return f"{task.type}-{task.index}.log"
