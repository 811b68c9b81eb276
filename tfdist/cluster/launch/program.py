"""What every task of a job runs, and what the end of a task means for its job."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Mapping

from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = ["BETWEEN_GRAPH", "ESTIMATORS", "SERVED", "SERVER_MODULE", "STAGED", "Program", "Role"]

#: The module that joins the cluster, enters the strategy's scope and runs the script.
TASK_MODULE = "tfdist.cli.task"

#: The module that joins the cluster and serves the chief; it runs no script.
SERVER_MODULE = "tfdist.cli.server"

#: Set in a task unless the user set them, also where the script makes its own strategy: complete
#: logs, with the stacks of a task that crashes.
_FOR_LOGS = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}

#: The same where tfdist makes the strategy: quiet logs, GPUs that can be shared.
_DEFAULTS = {
    **_FOR_LOGS,
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}


class Role(enum.Enum):
    """What the end of a task means for its job."""

    #: The job is done when all tasks of this role have ended well. A failure ends the job.
    MAIN = "main"
    #: As main. If it fails, it is started again in its place while restarts are left.
    REJOINS = "rejoins"
    #: Runs until the job is done and is then stopped. A failure ends the job.
    NEEDED = "needed"
    #: Runs until the job is done and is then stopped. If it fails, the others do its work.
    SPARE = "spare"


#: Roles where the chief alone runs the script and the others serve it: `parameter_server`.
SERVED = {"worker": Role.SPARE, "ps": Role.NEEDED}

#: Roles where workers hold stages of the chief's model, and nobody else can do their work.
STAGED = {"worker": Role.NEEDED}

#: Roles where each worker runs the script and parameter servers wait without an end.
BETWEEN_GRAPH = {"ps": Role.NEEDED}

#: The same for Estimators: a worker that comes back finds the variables on the servers.
ESTIMATORS = {"worker": Role.REJOINS, "ps": Role.NEEDED}


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
            itself, and besides TF_CONFIG only what serves its log is set.
        roles: the roles of task types other than `Role.MAIN`. Unless `env_only`, these tasks run a
            server instead of the script.
        task_flags: whether the script gets its place as the flags of TensorFlow 1's tutorials.
        python: the interpreter.
    """

    script: str
    config: str
    seed: int | None
    args: tuple[str, ...] = ()
    env_only: bool = False
    roles: Mapping[str, Role] = dataclasses.field(default_factory=dict)
    task_flags: bool = False
    python: str = sys.executable

    def role(self, task: Task) -> Role:
        """What the end of a task means where all tasks are started here."""
        return self.roles.get(task.type, Role.MAIN)

    def command(self, task: Task, cluster: ClusterSpec | None = None) -> tuple[str, ...]:
        """The command of a task.

        Args:
            task: the task.
            cluster: all tasks.

        Raises:
            ConfigError: if the flags cannot name that task or cluster.
        """
        if self.env_only:
            flags = _task_flags(task, cluster) if self.task_flags and cluster is not None else ()
            return (self.python, self.script, *self.args, *flags)
        if self.role(task) is not Role.MAIN:
            return (self.python, "-m", SERVER_MODULE)
        return (self.python, "-m", TASK_MODULE, self.script, *self.args)

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
