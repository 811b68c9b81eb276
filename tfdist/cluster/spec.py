"""Who is in the cluster: frozen values and pure functions, without TensorFlow."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["TASK_TYPES", "Address", "ClusterSpec", "Task"]

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


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a task listens.

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
            ValueError: if it is not of that form.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is not host:port with a port from 1 to 65535.")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"{text!r}: write an IPv6 address in brackets, as [::1]:{port}.")
        return cls(host, int(port))


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """All tasks and their addresses.

    Attributes:
        addresses: for each task type that has tasks, their addresses by index.
    """

    addresses: Mapping[str, tuple[Address, ...]]

    def tasks(self) -> Iterator[tuple[Task, Address]]:
        """Every task with its address, in the order of `TASK_TYPES`, then by index."""
        for kind in TASK_TYPES:
            for index, address in enumerate(self.addresses.get(kind, ())):
                yield Task(kind, index), address

    def address(self, task: Task) -> Address:
        """Where a task listens.

        Raises:
            KeyError: if the cluster has no such task.
        """
        try:
            return self.addresses[task.type][task.index]
        except (KeyError, IndexError):
            raise KeyError(f"The cluster has no task {task}.") from None

    @property
    def computing(self) -> tuple[Task, ...]:
        """The tasks that compute, in the order of their ranks."""
        return tuple(task for task, _ in self.tasks() if task.type in ("chief", "worker"))

    @property
    def chief(self) -> Task:
        """The task of type chief, or worker 0 where there is none."""
        return self.computing[0]

    def as_dict(self) -> dict[str, list[str]]:
        """The `cluster` of a TF_CONFIG."""
        return {kind: [str(a) for a in self.addresses[kind]] for kind in TASK_TYPES if self.addresses.get(kind)}

    def tf_config(self, task: Task) -> str:
        """The TF_CONFIG of one task, as JSON text."""
        self.address(task)
        content: dict[str, Any] = {
            "cluster": self.as_dict(),
            "task": {"type": task.type, "index": task.index},
        }
        return json.dumps(content, sort_keys=True)
