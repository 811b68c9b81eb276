"""Who is in the cluster: frozen values and pure functions, without TensorFlow."""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.cluster.addresses import Address
from tfdist.errors import ConfigError

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

    def address(self, task: Task) -> Address:
        """Where a task listens.

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
        """The task of type chief, or the first worker where there is none.

        Raises:
            KeyError: if no task of the cluster computes.
        """
        if not self.computing:
            raise KeyError("The cluster has no chief and no worker.")
        return self.computing[0]

    def as_dict(self) -> dict[str, list[str] | dict[str, str]]:
        """The `cluster` of a TF_CONFIG: lists, or maps by index where numbers are missing."""
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
