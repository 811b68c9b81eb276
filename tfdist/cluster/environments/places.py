"""What an environment answers: who this process is, who the others are, and how it is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tfdist.cluster.addresses import Address
from tfdist.cluster.spec import TASK_TYPES, ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = ["Absent", "Place", "Roles", "Surroundings", "counted", "seen"]

_LONGEST = 48


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """Which ranks of a scheduler become tasks of which type.

    Ranks are dealt out in the order of `TASK_TYPES`: the first is the chief where one is asked for,
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
        """How many tasks of each type there are among `size`; types without tasks are left out.

        Args:
            size: the number of all tasks.
            source: what says so, for messages, such as `SLURM_NTASKS=4`.

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
        """Compares what was asked for with a cluster whose roles are given.

        Raises:
            ConfigError: if they differ in what was asked for.
        """
        asked = {"chief": int(self.chief), "ps": self.ps, "evaluator": self.evaluator}
        for kind, number in asked.items():
            if number and number != counts.get(kind, 0):
                raise ConfigError(
                    f"{kind}={number} conflicts with {source}, whose cluster has "
                    f"{counts.get(kind, 0)} of type {kind}. Leave {kind} out: that cluster says "
                    "itself which task has which role."
                )

    def __str__(self) -> str:
        asked = {"chief": int(self.chief), "ps": self.ps, "evaluator": self.evaluator}
        return " and ".join(f"{kind}={number}" for kind, number in asked.items() if number) or "0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What environments are recognised by.

    Attributes:
        environ: environment variables.
        hostname: this machine's name, or empty where it is not known.
        hostfile: a file of hosts that the user named.
        roles: which ranks get which role, where ranks are all there is.
        port: the first port on each host, where the environment does not give the ports; None means
            the environment's own rule.
    """

    environ: Mapping[str, str]
    hostname: str = ""
    hostfile: Path | None = None
    roles: Roles = Roles()
    port: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Who this process is.

    Attributes:
        environment: the environment's name.
        reason: the variables that say so, with their values.
        counts: the number of tasks of each type, in the order of `TASK_TYPES`.
        task: this process's task; None if the environment does not say which it is.
        cluster: all tasks with their addresses; None where no variable tells the addresses.
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
        """Whether the tasks still have to tell each other where they are."""
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
        reason: what is missing.
    """

    reason: str


def counted(counts: Mapping[str, int]) -> str:
    """Numbers of tasks by their type, in words: "1 chief, 3 workers, 2 ps"."""
    parts = (f"{n} {kind}{'s' * (n != 1 and kind != 'ps')}" for kind, n in counts.items())
    return ", ".join(parts)


def seen(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """The variables that are set, with their values, as a reason or for a message."""
    return ", ".join(f"{name}={_short(environ[name])}" for name in names if name in environ)


def _short(value: str) -> str:
    text = " ".join(value.split())
    half = (_LONGEST - 1) // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}…{text[-half:]}"
