"""The plan of a launch, as data: printed by `--dry-run`, tested without a process.

Planning is apart from spawning, so that other launchers (ssh, Slurm) can reuse the plan.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfdist.cluster import resources as gpu_lists
from tfdist.cluster.spec import Address, ClusterSpec, Task, on_hosts
from tfdist.cluster.tf_config import ClusterVariables
from tfdist.errors import ConfigError
from tfdist.utils import run_record

__all__ = [
    "BETWEEN_GRAPH",
    "ESTIMATORS",
    "SERVER_MODULE",
    "STAGED",
    "WITH_SERVERS",
    "JobPlan",
    "Program",
    "Role",
    "TaskPlan",
    "cluster_variables",
    "local_cluster",
    "local_ranks",
    "plan_local",
    "plan_member",
    "record_of",
    "task_plan",
    "training",
]


# The program of the tasks of a job, and the meaning of a task's end for its job.

#: The module that joins the cluster, enters the strategy's scope and runs the script.
TASK_MODULE = "tfdist.cli.task"

#: The module that joins the cluster and serves the chief; it runs no script.
SERVER_MODULE = "tfdist.cli.server"

#: Set in a task unless the user set them, also if the script makes its own strategy: complete
#: logs, with the stacks of a task that crashes.
_FOR_LOGS = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}

#: The same if tfdist makes the strategy: quiet logs, GPUs that can be shared.
_DEFAULTS = {
    **_FOR_LOGS,
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}


class Role(enum.Enum):
    """The meaning of a task's end for its job."""

    #: The job is done when all tasks of this role have ended well. A failure ends the job.
    MAIN = "main"
    #: As main. If it fails, it is started again in its place while restarts are left.
    REJOINS = "rejoins"
    #: Runs until the job is done and is then stopped. A failure ends the job.
    NEEDED = "needed"
    #: Runs until the job is done and is then stopped. If it fails, the others do its work.
    SPARE = "spare"


#: The roles if the chief alone runs the script and is served by others: `parameter_server`.
WITH_SERVERS = {"worker": Role.SPARE, "ps": Role.NEEDED}

#: The roles if workers hold stages of the chief's model, and nobody else can do their work.
STAGED = {"worker": Role.NEEDED}

#: The roles if each worker runs the script and parameter servers wait without an end.
BETWEEN_GRAPH = {"ps": Role.NEEDED}

#: The same for Estimators: a worker that comes back finds the variables on the servers.
ESTIMATORS = {"worker": Role.REJOINS, "ps": Role.NEEDED}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The program that every task runs.

    Attributes:
        script: the user's Python script, or the name of a module.
        args: its arguments.
        module: whether `script` is the name of a module.
        config: the strategy configuration as JSON; goes to the tasks as TFDIST_CONFIG.
        seed: the one seed of the job; goes to the tasks as TFDIST_SEED. None if the tasks get
            the chief's when they join.
        env_only: whether the script builds its own strategy from TF_CONFIG: it then is run by
            itself, and besides TF_CONFIG only what serves its log is set.
        roles: the roles of task types other than `Role.MAIN`. Unless `env_only`, these tasks run a
            server instead of the script.
        written: the options that are not written as flags; go to the tasks as TFDIST_WRITTEN.
        task_flags: whether the script gets its place as the flags of TensorFlow 1's tutorials.
        python: the interpreter.
    """

    script: str
    config: str
    seed: int | None
    args: tuple[str, ...] = ()
    module: bool = False
    env_only: bool = False
    roles: Mapping[str, Role] = dataclasses.field(default_factory=dict)
    written: tuple[str, ...] = ()
    task_flags: bool = False
    python: str = sys.executable

    def role(self, task: Task) -> Role:
        """The meaning of a task's end if all tasks are started here."""
        return self.roles.get(task.type, Role.MAIN)

    def command(self, task: Task, cluster: ClusterSpec | None = None) -> tuple[str, ...]:
        """The command of a task.

        Args:
            task: the task.
            cluster: all tasks.

        Raises:
            ConfigError: if the flags cannot name that task or cluster.
        """
        script = ("-m", self.script) if self.module else (self.script,)
        if self.env_only:
            flags = _task_flags(task, cluster) if self.task_flags and cluster is not None else ()
            return (self.python, *script, *self.args, *flags)
        if self.role(task) is not Role.MAIN:
            return (self.python, "-m", SERVER_MODULE)
        return (self.python, "-m", TASK_MODULE, *script, *self.args)

    def environ(self, base: Mapping[str, str]) -> dict[str, str | None]:
        """The changes to the environment that all tasks share.

        Args:
            base: the environment that the changes are made to; what the user set there is kept.
        """
        changes: dict[str, str | None] = {
            name: value for name, value in _DEFAULTS.items() if name not in base
        }
        if self.env_only and self.roles is not ESTIMATORS:
            return {name: changes[name] for name in changes if name in _FOR_LOGS}
        if self.roles and "GRPC_FAIL_FAST" not in base:
            changes["GRPC_FAIL_FAST"] = "use_caller"
        if self.env_only:
            return changes
        changes.update(TFDIST_CONFIG=self.config, TFDIST_LAUNCHED="1")
        if self.seed is not None:
            changes["TFDIST_SEED"] = str(self.seed)
        if self.written:
            changes["TFDIST_WRITTEN"] = ",".join(self.written)
        return changes


def _task_flags(task: Task, cluster: ClusterSpec) -> tuple[str, ...]:
    """A task's place as the flags that the tutorials of TensorFlow 1 read."""
    strange = [kind for kind in cluster.addresses if kind not in ("worker", "ps")]
    if strange or cluster.indices:
        what = f"tasks of type {strange[0]}" if strange else "tasks whose numbers have gaps"
        raise ConfigError(
            f"--task-flags conflicts with the cluster of TF_CONFIG, which has {what}: the flags "
            "--ps_hosts and --worker_hosts list parameter servers and workers, numbered from 0. "
            "Make the chief worker 0, or leave --task-flags out if the script reads TF_CONFIG."
        )
    hosts = {kind: ",".join(map(str, cluster.addresses.get(kind, ()))) for kind in ("ps", "worker")}
    return (
        f"--job_name={task.type}",
        f"--task_index={task.index}",
        f"--ps_hosts={hosts['ps']}",
        f"--worker_hosts={hosts['worker']}",
    )


#: The host of the tasks of this machine. An address, so that no name lookup can fail.
LOCAL_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """The command, address and environment of one task.

    Attributes:
        task: which task it is.
        address: where it listens; None for a process that is not part of a cluster.
        command: the program and its arguments, never for a shell.
        environ: the changes of its environment; None removes a variable.
        log: the file that gets its output.
        role: the meaning of its end for the job.
        host: the machine on which it runs, if it is another: the command is then ssh's.
        order: makes the text that the command reads from its standard input, which stays open
            after that. None leaves standard input alone.
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
    """The plan of all tasks of this machine.

    Attributes:
        tasks: the tasks to start here, in the order of their ranks.
        cluster: all tasks of the job, also those of other machines; None if a single process
            needs no cluster.
        shown: the task whose output the terminal shows.
        log_dir: the directory of the log files.
        max_restarts: how often, in all, what has failed is started again: a spare task in its
            place, or else the whole job.
        begins_at: where TensorFlow listens as soon as the job has begun. A spare task that fails
            before ends the job: the others wait for it. None if that makes no difference.
        settle: seconds that the others have to end by themselves after the first has failed. None
            means as many as it takes to distinguish the cause from its consequences.
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
    """A cluster of this machine, one task for each port: workers by default.

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
    variables = cluster_variables(program, cluster, log_dir)
    tasks = tuple(
        task_plan(program, cluster, task, log_dir, environ, shares.get(task), variables)
        for task, _ in cluster.tasks()
    )
    spare = Role.SPARE in program.roles.values() and not program.env_only
    return JobPlan(
        tasks=tasks,
        cluster=cluster,
        shown=cluster.chief,
        log_dir=log_dir,
        begins_at=cluster.address(cluster.chief) if spare else None,
        files=variables.files,
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
        gpus_each: the GPUs that each task has by its scheduler, if that sets a number.

    Raises:
        ConfigError: if the cluster has no such task.
    """
    try:
        cluster.address(task)
    except KeyError:
        have = ", ".join(str(other) for other, _ in cluster.tasks())
        raise ConfigError(
            f"TF_CONFIG says that this is task {str(task)!r}, but its cluster has: {have}. "
            "Correct the type and index of its task."
        ) from None
    variables = cluster_variables(program, cluster, log_dir)
    changes = program.environ(environ)
    if variables.files:
        changes.update(variables.changes(task))
    elif "TF_CONFIG" in environ:  # Perhaps not yet in the environment of this process.
        changes["TF_CONFIG"] = environ["TF_CONFIG"]
    own = _own_gpus(program, cluster, task, gpus, gpus_each, "CUDA_VISIBLE_DEVICES" in environ)
    plan = _task_plan(program, cluster, task, log_dir, changes, own)
    plan = dataclasses.replace(plan, role=Role.MAIN)
    files = variables.files
    return JobPlan(tasks=(plan,), cluster=cluster, shown=task, log_dir=log_dir, files=files)


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
    local = local_ranks(program, cluster).get(task)
    return () if local is None else gpu_lists.of_member(gpus, local, each, chosen=chosen)


def local_ranks(program: Program, cluster: ClusterSpec) -> dict[Task, tuple[int, int]]:
    """For each task that trains its number among those of its host, and how many these are."""
    trains = training(program, cluster)
    hosts = [cluster.address(task).host for task in trains]
    return dict(zip(trains, on_hosts(hosts), strict=True))


def cluster_variables(program: Program, cluster: ClusterSpec, log_dir: Path) -> ClusterVariables:
    """The variables by which the tasks of a program know their place.

    Raises:
        ConfigError: if the cluster needs a file, and the script reads TF_CONFIG itself.
    """
    variables = ClusterVariables(cluster, log_dir)
    if variables.files and program.env_only:
        raise ConfigError(
            f"The TF_CONFIG of this cluster of {len(list(cluster.tasks()))} tasks is longer than a "
            "variable may be on Linux (128 KiB), and the script reads it itself (--env-only, "
            "--every-task). Run it under a strategy of tfdist, or on fewer tasks."
        )
    return variables


def task_plan(
    program: Program,
    cluster: ClusterSpec | None,
    task: Task,
    log_dir: Path,
    environ: Mapping[str, str],
    gpus: tuple[str, ...] | None,
    variables: ClusterVariables | None = None,
) -> TaskPlan:
    """Plans one task; see `plan_local`. `gpus` are those that it sees; None means all."""
    changes = program.environ(environ)
    if variables is not None:
        changes.update(variables.changes(task))
    elif "TF_CONFIG" in environ:
        changes["TF_CONFIG"] = None
    return _task_plan(program, cluster, task, log_dir, changes, gpus)


def _task_plan(
    program: Program,
    cluster: ClusterSpec | None,
    task: Task,
    log_dir: Path,
    changes: dict[str, str | None],
    gpus: tuple[str, ...] | None,
) -> TaskPlan:
    if gpus is not None:
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return TaskPlan(
        task=task,
        address=None if cluster is None else cluster.address(task),
        command=program.command(task, cluster),
        environ={**changes, **_record(program, log_dir / _log_name(task))},
        log=log_dir / _log_name(task),
        role=program.role(task),
    )


def training(program: Program, cluster: ClusterSpec) -> tuple[Task, ...]:
    """The tasks that hold replicas: if the chief is served, it holds none."""
    has_servers = Role.SPARE in program.roles.values()
    return tuple(task for task in cluster.computing if task.type == "worker" or not has_servers)


def _shares(
    program: Program, cluster: ClusterSpec, gpus: tuple[str, ...], devices: int | None
) -> dict[Task, tuple[str, ...]]:
    """The GPUs of each task. A task that is not named sees all."""
    if not gpus:
        return {}
    trains = training(program, cluster)
    assigned: dict[Task, tuple[str, ...]] = {
        task: () for task, _ in cluster.tasks() if task not in trains
    }
    if len(trains) > 1 or devices is not None:
        shares = gpu_lists.split(gpus, len(trains), devices)
        assigned.update(zip(trains, shares, strict=True))
    return assigned


def _log_name(task: Task) -> str:
    return f"{task.type}-{task.index}.log"


def record_of(log: Path) -> Path:
    """The file beside a task's log to which the task writes its progress."""
    return log.with_suffix(run_record.SUFFIX)


def _record(program: Program, log: Path) -> dict[str, str]:
    """The variable that names a task's record, for programs that tfdist runs in a scope."""
    return {} if program.env_only else {"TFDIST_RECORD": str(record_of(log))}
