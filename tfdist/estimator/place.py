"""This task's place in the cluster that TF_CONFIG describes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.checks.cluster import SPARSE
from tfdist.cluster.listing import own_tf_config
from tfdist.cluster.spec import Task
from tfdist.cluster.tf_config import parse_tf_config, refuse_gaps
from tfdist.errors import ConfigError

__all__ = ["Place", "own_place", "place_of"]

_ALONE = Task("worker", 0)


@dataclasses.dataclass(frozen=True)
class Place:
    """A task and its cluster.

    Attributes:
        cluster: the addresses of each type of task; empty for one process.
        type: this task's type.
        index: its index among those of its type.
        chief: the task that initializes and saves.
        model_dir: that of TF_CONFIG, or None.
        service: that of TF_CONFIG, or None.
        evaluated: whether the cluster lists an evaluator.
    """

    cluster: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    type: str = "worker"
    index: int = 0
    chief: Task = _ALONE
    model_dir: str | None = None
    service: Any = None
    evaluated: bool = False

    @property
    def apart(self) -> bool:
        """Whether this task takes no part in the training."""
        return self.type == "evaluator"

    @property
    def is_chief(self) -> bool:
        """Whether this task initializes and saves."""
        return Task(self.type, self.index) == self.chief

    @property
    def master(self) -> str:
        """The address of this task's own server, or ""."""
        if not self.cluster or self.apart:
            return ""
        return f"grpc://{_listed(self.cluster[self.type])[self.index]}"

    @property
    def trainers(self) -> int:
        """The number of tasks that train."""
        if self.apart:
            return 0
        return max(1, self.count("chief") + self.count("worker"))

    @property
    def global_id(self) -> int | None:
        """This task's number: the chief, then the workers, then the parameter servers."""
        if self.apart:
            return None
        kinds = ("chief", "worker", "ps")
        return sum(map(self.count, kinds[: kinds.index(self.type)])) + self.index

    def count(self, kind: str) -> int:
        """The number of tasks of a type; 0 for an evaluator."""
        return 0 if self.apart else len(self.cluster.get(kind, ()))


def own_place() -> Place:
    """This process's place by its TF_CONFIG; a process of its own where there is none.

    Raises:
        ConfigError: if TF_CONFIG has mistakes.
    """
    text = own_tf_config()
    return Place() if text is None else place_of(text)


def place_of(text: str) -> Place:
    """The place that a TF_CONFIG describes.

    Raises:
        ConfigError: if it has mistakes.
    """
    content = json.loads(text) if text.strip() else {}
    more = content if isinstance(content, dict) else {}
    told: dict[str, Any] = {"model_dir": more.get("model_dir"), "service": more.get("service")}
    if not (more.get("cluster") or more.get(SPARSE)):
        _check_alone(text, more.get("task"))
        return Place(**told)
    cluster, task = parse_tf_config(text)
    refuse_gaps(cluster, "an Estimator")
    if task is None:
        raise ConfigError(
            f"TF_CONFIG={text!r} does not say which task this process is. Add "
            '"task": {"type": "worker", "index": 0}.'
        )
    told["evaluated"] = "evaluator" in cluster.addresses
    tasks = {kind: names for kind, names in cluster.as_dict().items() if kind != "evaluator"}
    if task.type == "evaluator":
        return Place(tasks, "evaluator", task.index, cluster.chief, **told)
    return Place(tasks, task.type, task.index, cluster.chief, **told)


def _check_alone(text: str, task: Any) -> None:
    """Refuses a task without a cluster, unless it is what one process is: worker 0.

    Raises:
        ConfigError: for another task, which would train as the chief.
    """
    kind, index = (task.get("type"), task.get("index")) if isinstance(task, dict) else (None, None)
    if kind in (None, "worker") and index in (None, 0, "0"):
        return
    raise ConfigError(
        f"TF_CONFIG={text!r} names the task {kind} {index} and no cluster, so it would train alone "
        'and be the chief. Add "cluster", or remove "task" to train in one process.'
    )


def _listed(names: Any) -> Mapping[int, str]:
    """The addresses of one type by index."""
    if isinstance(names, Mapping):
        return {int(index): name for index, name in names.items()}
    return dict(enumerate(names))
