"""The cluster and its tasks: frozen values and pure functions, without TensorFlow."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import ipaddress
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist.errors import ConfigError

__all__ = [
    "TASK_TYPES",
    "Address",
    "ClusterSpec",
    "ClusterUse",
    "Rank",
    "Task",
    "Topology",
    "address_mistake",
    "counted",
    "is_any_address",
    "is_ip",
    "is_loopback",
    "on_hosts",
    "rank_of",
    "ranks",
]


# The address of a task, and the mistakes in text that should be one.

_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


class Topology(enum.Enum):
    """The tasks that a strategy runs on.

    Attributes:
        ONE_PROCESS: no cluster.
        WORKERS: tasks of one kind, all of which run the script; the first is the chief.
        SERVERS: a chief that runs the script, workers that compute, and ps that hold the weights.
        STAGES: a chief that runs the script and computes, and workers that compute.
    """

    ONE_PROCESS = enum.auto()
    WORKERS = enum.auto()
    SERVERS = enum.auto()
    STAGES = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterUse:
    """The use that a strategy makes of a cluster.

    Attributes:
        strategy: its name.
        topology: the tasks that it runs on.
        tensorflow_connects: whether TensorFlow waits for all tasks of the cluster when it starts.
    """

    strategy: str
    topology: Topology
    tensorflow_connects: bool = False


@dataclasses.dataclass(frozen=True)
class Address:
    """The address on which a task listens.

    Attributes:
        host: a name, an IPv4 address or an IPv6 address without brackets.
        port: 1 to 65535.
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `host:port` or `[ipv6]:port`.

        Raises:
            ConfigError: if it is not of that form; a `ValueError` with the form to write.
        """
        mistake = address_mistake(text)
        if mistake is not None:
            raise ConfigError(" ".join(mistake))
        host, _, port = text.rpartition(":")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))


def address_mistake(text: str) -> tuple[str, str] | None:
    """The mistake in an address and the correction, or None for a good one."""
    return _form_mistake(text) or _host_mistake(text) or _port_mistake(text)


def _form_mistake(text: str) -> tuple[str, str] | None:
    if not text.strip():
        return f'"{text}" is empty.', "Write host:port, such as 10.0.0.1:12345."
    if "://" in text:
        bare = text.split("://", 1)[1]
        return f'"{text}" is a URL.', f'Write host:port without the scheme: "{bare}".'
    if re.search(r"[,;]", text):
        return f'"{text}" holds several addresses.', "Make each a string of its own in the list."
    if re.search(r"\s", text):
        return f'"{text}" contains a space.', f'Write "{"".join(text.split())}".'
    if _is_ip(text, 6):
        bare = f"[{text}]:12345"
        return f'"{text}" is an IPv6 address without a port.', f'Write it as in "{bare}".'
    return None


def _host_mistake(text: str) -> tuple[str, str] | None:
    host, colon, port = text.rpartition(":")
    host = host if colon and not text.endswith("]") else text
    if not host:
        return f'"{text}" has no host.', f'Write a name or address: "10.0.0.1:{port}".'
    if host.startswith("[") and host.endswith("]"):
        inside = host[1:-1]
        if not _is_ip(inside, 6):
            return f'"{inside}" in "{text}" is not an IPv6 address.', "Only those take brackets."
    elif ":" in host:
        return (
            f'"{text}" has more than one colon.',
            f'Write one port; an IPv6 address goes in brackets: "[{host}]:{port}".',
        )
    elif re.fullmatch(r"[\d.]+", host) and not _is_ip(host, 4):
        return f'"{host}" is not an IPv4 address.', "Write four numbers from 0 to 255, or a name."
    elif host.startswith("-"):
        # A program that is given such a name, as ssh is, takes it for an option.
        return f'"{host}" is not a host name.', "A name begins with a letter or a digit."
    elif re.search(r"[^\w.\-]", host):
        return f'"{host}" is not a host name.', "Write only letters, digits, hyphens and dots."
    return None


def _port_mistake(text: str) -> tuple[str, str] | None:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return f'"{text}" has no port.', f'Write host:port, such as "{text}:12345".'
    if not re.fullmatch(r"[0-9]{1,9}", port) or not 0 < int(port) < 65536:
        return (
            f'"{port}" in "{text}" is not a port.',
            f'Write a number from 1 to 65535, such as "{host}:12345".',
        )
    return None


def _is_ip(host: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def is_ip(host: str) -> bool:
    """Whether a host is an address, not a name."""
    return _is_ip(host, 4) or _is_ip(host, 6)


def is_loopback(host: str) -> bool:
    """Whether a host means "this machine" on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES


def is_any_address(host: str) -> bool:
    """Whether a host means "all interfaces", which a server can listen on and nobody can call."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


#: Types of tasks, in the order in which ranks are counted.
TASK_TYPES = ("chief", "worker", "ps", "evaluator")


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One process of the cluster.

    Attributes:
        type: one of `TASK_TYPES`.
        index: its number among the tasks of its type, from 0.
    """

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


def counted(counts: Mapping[str, int]) -> str:
    """Numbers of tasks by their type, in words: "1 chief, 3 workers, 2 ps"."""
    parts = (f"{n} {kind}{'s' * (n != 1 and kind != 'ps')}" for kind, n in counts.items())
    return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """All tasks and their addresses.

    Attributes:
        addresses: for each task type that has tasks, their addresses by index.
        indices: for a task type whose numbers have gaps, the index of each of its addresses. Types
            that are not named here count from 0.

    Raises:
        ConfigError: for a task type that does not exist, or indices that do not fit the addresses.
    """

    addresses: Mapping[str, tuple[Address, ...]]
    indices: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # Copied in one order and form, so that equal clusters compare equal.
        unknown = sorted((set(self.addresses) | set(self.indices)) - set(TASK_TYPES))
        if unknown:
            raise ConfigError(
                f"{unknown[0]!r} is not a type of task. Use one of {', '.join(TASK_TYPES)}."
            )
        addresses = {k: tuple(self.addresses[k]) for k in TASK_TYPES if self.addresses.get(k)}
        indices = {k: self._order(k, len(addresses.get(k, ()))) for k in self.indices}
        sparse = {k: i for k, i in indices.items() if i != tuple(range(len(i)))}
        object.__setattr__(self, "addresses", addresses)
        object.__setattr__(self, "indices", sparse)

    def _order(self, kind: str, count: int) -> tuple[int, ...]:
        indices = tuple(self.indices[kind])
        if len(indices) != count or list(indices) != sorted({i for i in indices if i >= 0}):
            raise ConfigError(
                f"indices={dict(self.indices)!r} gives {kind} the numbers {indices!r} for {count} "
                "addresses. Give each address one number, rising from 0 or more."
            )
        return indices

    def task_indices(self, kind: str) -> tuple[int, ...]:
        """The indices of the tasks of one type, rising."""
        return self.indices.get(kind) or tuple(range(len(self.addresses.get(kind, ()))))

    def tasks(self) -> Iterator[tuple[Task, Address]]:
        """Every task with its address, in the order of `TASK_TYPES`, then by index."""
        for kind, addresses in self.addresses.items():
            for index, address in zip(self.task_indices(kind), addresses, strict=True):
                yield Task(kind, index), address

    @property
    def is_on_loopback(self) -> bool:
        """Whether no other machine can reach a task at the address that is listed."""
        return all(is_loopback(address.host) for _, address in self.tasks())

    def address(self, task: Task) -> Address:
        """The address on which a task listens.

        Raises:
            KeyError: if the cluster has no such task.
        """
        addresses, indices = self.addresses.get(task.type, ()), self.indices.get(task.type)
        position = task.index
        if indices is not None:
            position = bisect.bisect_left(indices, task.index)
            if task.index not in indices[position : position + 1]:
                position = -1
        if not 0 <= position < len(addresses):
            raise KeyError(f"The cluster has no task {task}.")
        return addresses[position]

    @property
    def computing(self) -> tuple[Task, ...]:
        """The tasks that compute, in the order of their ranks."""
        return tuple(task for task, _ in self.tasks() if task.type in ("chief", "worker"))

    @property
    def chief(self) -> Task:
        """The task of type chief, or the first worker if there is none.

        Raises:
            KeyError: if no task of the cluster computes.
        """
        if not self.computing:
            raise KeyError("The cluster has no chief and no worker.")
        return self.computing[0]

    def as_dict(self) -> dict[str, list[str] | dict[str, str]]:
        """The `cluster` of a TF_CONFIG: lists, or maps by index if numbers are missing."""
        content: dict[str, list[str] | dict[str, str]] = {}
        for kind, addresses in self.addresses.items():
            names = [str(address) for address in addresses]
            if kind in self.indices:
                content[kind] = dict(zip(map(str, self.indices[kind]), names, strict=True))
            else:
                content[kind] = names
        return content

    def tf_config(self, task: Task) -> str:
        """The TF_CONFIG of one task, as JSON text.

        Args:
            task: a task of the cluster, or an evaluator outside of it: an evaluator takes no part
                in the training and need not be listed.

        Raises:
            KeyError: if the cluster has no such task.
        """
        if task.type != "evaluator" or "evaluator" in self.addresses:
            self.address(task)
        content: dict[str, Any] = {
            "cluster": self.as_dict(),
            "task": {"type": task.type, "index": task.index},
        }
        return json.dumps(content, sort_keys=True)


# The rank of a task among those that compute: in all, on its host, and across hosts.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """A process's numbers, as Horovod and MPI count them.

    Attributes:
        host: the host's name or address.
        rank: its number among all processes.
        size: the number of all processes.
        local_rank: its number among the processes of its host.
        local_size: the number of processes of its host.
        cross_rank: its number among the processes that have its `local_rank` on their hosts.
        cross_size: the number of these.
    """

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def ranks(cluster: ClusterSpec) -> tuple[Rank, ...]:
    """The ranks of the tasks that compute, in their order.

    Tasks belong to one host if their addresses have the same text for it.
    """
    hosts = [a.host for task, a in cluster.tasks() if task.type in ("chief", "worker")]
    on_local: Counter[int] = Counter()
    positions = []
    for host, (local, count) in zip(hosts, on_hosts(hosts), strict=True):
        positions.append((host, local, count, on_local[local]))
        on_local[local] += 1
    return tuple(
        Rank(
            host=host,
            rank=i,
            size=len(hosts),
            local_rank=local,
            local_size=count,
            cross_rank=cross,
            cross_size=on_local[local],
        )
        for i, (host, local, count, cross) in enumerate(positions)
    )


def on_hosts(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """For each process its number on its host, and how many that host has.

    Args:
        hosts: the host of each process, in the order of their ranks.
    """
    counts, seen = Counter(hosts), Counter[str]()
    numbered = []
    for host in hosts:
        numbered.append((seen[host], counts[host]))
        seen[host] += 1
    return numbered


def rank_of(cluster: ClusterSpec, task: Task) -> Rank:
    """The rank of one task.

    Raises:
        ValueError: if it is not among those that compute.
    """
    return ranks(cluster)[cluster.computing.index(task)]
