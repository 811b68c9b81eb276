"""The base of environments: this process's task, the other tasks, and the reason for the answer."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tfdist.cluster.spec import TASK_TYPES, Address, ClusterSpec, Task, counted, on_hosts
from tfdist.errors import ConfigError

__all__ = [
    "DEFAULT_PORT",
    "MOST_ON_A_HOST",
    "Absent",
    "ProcessContext",
    "Roles",
    "TaskAssignment",
    "addresses",
    "assign_rank",
    "check_rank",
    "first_port",
    "number",
    "same_host",
    "seen",
]

_LONGEST = 48


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """The assignment of a scheduler's ranks to task types.

    Ranks are dealt out in the order of `TASK_TYPES`: the first is the chief if one is asked for,
    then come the workers, the last ranks are ps, and the very last the evaluator.

    Attributes:
        chief: whether the first rank is of type chief.
        ps: number of tasks of type ps.
        evaluator: number of evaluators; TensorFlow allows one.

    Raises:
        ConfigError: if a number is negative, or there are several evaluators.
    """

    chief: bool = False
    ps: int = 0
    evaluator: int = 0

    def __post_init__(self) -> None:
        if self.ps < 0:
            raise ConfigError(f"ps={self.ps} is negative. Give a number of 0 or more.")
        if self.evaluator not in (0, 1):
            raise ConfigError(
                f"evaluator={self.evaluator} asks for {self.evaluator} evaluators. TensorFlow "
                "allows one: give 0 or 1."
            )

    def counts(self, size: int, source: str) -> dict[str, int]:
        """The number of tasks of each type among `size`; types without tasks are left out.

        Args:
            size: the number of all tasks.
            source: the origin of the number, for messages, such as `SLURM_NTASKS=4`.

        Raises:
            ConfigError: if no task is left that computes.
        """
        workers = size - self.chief - self.ps - self.evaluator
        if workers < 0 or workers + self.chief < 1:
            raise ConfigError(
                f"{self} of {source} tasks leave none that computes. Start more tasks, or ask for "
                "fewer of these."
            )
        numbers = (int(self.chief), workers, self.ps, self.evaluator)
        return {kind: n for kind, n in zip(TASK_TYPES, numbers, strict=True) if n}

    def task(self, rank: int, size: int, source: str) -> Task:
        """The task that a rank becomes.

        Raises:
            ConfigError: if no task is left that computes.
        """
        index = rank
        for kind, count in self.counts(size, source).items():
            if index < count:
                return Task(kind, index)
            index -= count
        raise ConfigError(f"rank {rank} is not below {size}, the number of tasks by {source}.")

    def cluster(self, addresses: Sequence[Address], source: str) -> ClusterSpec:
        """The cluster whose ranks listen at these addresses.

        Raises:
            ConfigError: if no task is left that computes.
        """
        content: dict[str, Sequence[Address]] = {}
        begin = 0
        for kind, count in self.counts(len(addresses), source).items():
            content[kind] = addresses[begin : begin + count]
            begin += count
        return ClusterSpec({kind: tuple(part) for kind, part in content.items()})

    def check(self, counts: Mapping[str, int], source: str) -> None:
        """Compares the roles that were asked for with a cluster whose roles are given.

        Raises:
            ConfigError: if they differ.
        """
        for kind, number in dataclasses.asdict(self).items():
            if number and number != counts.get(kind, 0):
                raise ConfigError(
                    f"{kind}={int(number)} conflicts with {source}, whose cluster has "
                    f"{counts.get(kind, 0)} of type {kind}. Leave {kind} out: that cluster says "
                    "itself which task has which role."
                )

    def __str__(self) -> str:
        asked = dataclasses.asdict(self).items()
        return " and ".join(f"{kind}={int(number)}" for kind, number in asked if number) or "0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessContext:
    """The facts by which environments are recognised.

    Attributes:
        environ: environment variables.
        hostname: this machine's name, or empty if it is not known.
        hostfile: a file of hosts that the user named.
        roles: which ranks get which role, if ranks are all there is.
        port: the first port on each host, if the environment does not give the ports; None means
            the environment's own rule.
    """

    environ: Mapping[str, str]
    hostname: str = ""
    hostfile: Path | None = None
    roles: Roles = Roles()
    port: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskAssignment:
    """The task that an environment assigns to this process, and the others of its cluster.

    Attributes:
        environment: the environment's name.
        reason: the variables from which it follows, with their values.
        counts: the number of tasks of each type, in the order of `TASK_TYPES`.
        task: this process's task; None if the environment does not name it.
        cluster: all tasks with their addresses; None if no variable has the addresses.
        devices: GPUs that each task that computes has for itself; None if not known.
    """

    environment: str
    reason: str
    counts: Mapping[str, int]
    task: Task | None
    cluster: ClusterSpec | None = None
    devices: int | None = None

    @property
    def size(self) -> int:
        """The number of all tasks."""
        return sum(self.counts.values())

    @property
    def gathers(self) -> bool:
        """Whether the tasks still have to send each other their addresses."""
        return self.cluster is None and self.size > 1

    @property
    def counted(self) -> str:
        """The numbers of tasks in words: "1 chief, 3 workers, 2 ps"."""
        return counted(self.counts)

    def __str__(self) -> str:
        return f"{self.task or 'no task'} of {self.counted} by {self.environment} ({self.reason})"


@dataclasses.dataclass(frozen=True)
class Absent:
    """This process is not in the environment.

    Attributes:
        reason: the variable or condition that is missing.
    """

    reason: str


def seen(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """The variables that are set, with their values, as a reason or for a message."""
    return ", ".join(f"{name}={_short(environ[name])}" for name in names if name in environ)


def _short(value: str) -> str:
    text = " ".join(value.split())
    half = (_LONGEST - 1) // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}…{text[-half:]}"


# Ports that follow from a job's number, so that all its tasks know them and no other job has
# them.
#
# Each job has a block of ports on each of its hosts, one port for each of its tasks there:
#
# up to 16 tasks on a host: 12288 + 16 · ((job + 633 · step) mod 1024) + task on the host up to
# 128 tasks on a host: 28672 + 128 · ((job + 633 · step) mod 32) + task on the host
#
# All are from 12288 to 32767: above the ports of common services, below those that Linux gives to
# clients (32768 to 60999 by /proc/sys/net/ipv4/ip_local_port_range). It follows that
#
# - two jobs on one host share ports only if their numbers differ by a multiple of 1024, or of 32
#   if both have more than 16 tasks there. Jobs of the two kinds never do;
# - two steps of a job share none, up to 1024 and 32 steps. 633 is about 1024 divided by the
#   golden ratio: step s of a job has the block of a job whose number is far away, 93 or more for
#   s up to 7.

_STRIDE = 633
#: Most tasks on a host, first port, and number of blocks of each kind of job.
_KINDS = ((16, 12288, 1024), (128, 28672, 32))
#: The most tasks on a host for which there are ports.
MOST_ON_A_HOST = _KINDS[-1][0]


def first_port(job: int, step: int, on_a_host: int, source: str) -> int:
    """The port of the first task of each host.

    Args:
        job: the scheduler's number of the job.
        step: the number of the step in the job, or of the job in its array.
        on_a_host: the most tasks that the job has on one host.
        source: the origin of the numbers, for messages.

    Raises:
        ConfigError: if there are too many tasks on a host.
    """
    for most, first, blocks in _KINDS:
        if on_a_host <= most:
            return first + most * ((job + _STRIDE * step) % blocks)
    raise ConfigError(
        f"{source} puts {on_a_host} tasks on one host. Ports follow from the job's number for up "
        f"to {MOST_ON_A_HOST}. Give the first port yourself, such as port=20000."
    )


# From ranks on hosts to an assignment: what all schedulers have in common that number their tasks.

#: The port of TensorFlow's tasks if nobody names another, as Kubeflow and Vertex AI have it.
DEFAULT_PORT = 2222


def number(environ: Mapping[str, str], name: str, setter: str, least: int = 0) -> int:
    """The whole number that a variable holds.

    Args:
        environ: environment variables; the name must be among them.
        name: the variable.
        setter: the program that sets it, for messages, such as `Slurm's srun`.
        least: the least number that makes sense.

    Raises:
        ConfigError: if it holds none.
    """
    text = environ[name].strip()
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < least:
        raise ConfigError(
            f"{name}={environ[name]!r} is no whole number of {least} or more, as {setter} sets it. "
            "Unset it, or start the tasks with that launcher."
        )
    return int(text)


def check_rank(rank: int, size: int, rank_source: str, size_source: str) -> None:
    """Refuses a rank outside of its cluster.

    Raises:
        ConfigError: naming the two variables.
    """
    if rank >= size:
        raise ConfigError(
            f"{rank_source} is not below the number of tasks, {size} by {size_source}. They belong "
            "to different jobs: unset both, or start the tasks with one launcher."
        )


def addresses(hosts: Sequence[str], first_port: int, source: str) -> tuple[Address, ...]:
    """The addresses of all ranks: tasks of one host have the ports from `first_port` on.

    Args:
        hosts: each rank's host.
        first_port: the port of the first task of each host.
        source: the origin of the number, for messages.

    Raises:
        ConfigError: if there are more tasks on a host than ports are left, or no port is given.
    """
    if not 0 < first_port < 65536:
        raise ConfigError(f"port={first_port} is not a port. Give a number from 1 to 65535.")
    most = max(Counter(hosts).values(), default=0)
    if first_port + most > 65536:
        raise ConfigError(
            f"port={first_port} leaves no ports for the {most} tasks that {source} puts on one "
            f"host. Give a port of {65536 - most} or less."
        )
    numbered = zip(hosts, on_hosts(hosts), strict=True)
    return tuple(Address(host, first_port + number) for host, (number, _) in numbered)


def assign_rank(
    context: ProcessContext,
    *,
    environment: str,
    reason: str,
    source: str,
    hosts: Sequence[str],
    rank: int,
    first_port: int,
    devices: int | None = None,
) -> TaskAssignment:
    """The task of one rank of a cluster whose hosts are known.

    Args:
        context: the roles and, if the user named one, the port.
        environment: the environment's name.
        reason: the variables that were seen.
        source: the origin of the number of tasks, for messages.
        hosts: each rank's host.
        rank: this process's rank, below their number.
        first_port: the first port on each host if the user named none.
        devices: GPUs of each task that computes.
    """
    roles = context.roles
    listed = addresses(hosts, first_port if context.port is None else context.port, source)
    return TaskAssignment(
        environment=environment,
        reason=reason,
        counts=roles.counts(len(hosts), source),
        task=roles.task(rank, len(hosts), source),
        cluster=roles.cluster(listed, source),
        devices=devices,
    )


def same_host(one: str, other: str) -> bool:
    """Whether two names may be of one host: equal, or one is the other's first label."""
    one, other = one.lower().rstrip("."), other.lower().rstrip(".")
    return one == other or one.split(".")[0] == other or other.split(".")[0] == one
