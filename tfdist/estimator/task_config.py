"""This task and its cluster, as TF_CONFIG describes them to an Estimator."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.cluster.spec import Task
from tfdist.cluster.tf_config import own_tf_config, parse_tf_config, refuse_gaps
from tfdist.cluster.validation.structure import SPARSE
from tfdist.errors import ConfigError
from tfdist.types import Json

__all__ = ["TaskConfig", "own_task_config", "parse_task_config"]

_ALONE = Task("worker", 0)

#: The types of tasks by which they are numbered. TensorFlow 1 called the chief master.
_NUMBERED = ("chief", "master", "worker", "ps")


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """A task and its cluster.

    Attributes:
        cluster: the addresses of each type of task; empty for one process.
        type: this task's type, as TF_CONFIG names it.
        index: its index among those of its type.
        chief: the task that initializes and saves.
        model_dir: that of TF_CONFIG, or None.
        service: that of TF_CONFIG, or None.
        evaluated: whether the cluster lists an evaluator.
    """

    cluster: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    type: str = "worker"
    index: int = 0
    chief: Task = _ALONE
    model_dir: str | None = None
    service: Json = None
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
        """The address of this task's own server, or "" if there is no other task."""
        if self.apart or sum(map(len, self.cluster.values())) < 2:
            return ""
        return f"grpc://{self.cluster[self.type][self.index]}"

    @property
    def trainers(self) -> int:
        """The number of tasks that train."""
        if self.apart:
            return 0
        return max(1, sum(map(self.count, ("chief", "master", "worker"))))

    @property
    def global_id(self) -> int | None:
        """This task's number: the chief, then the workers, then the parameter servers."""
        if self.apart:
            return None
        before = _NUMBERED[: _NUMBERED.index(self.type)]
        return sum(map(self.count, before)) + self.index

    def count(self, kind: str) -> int:
        """The number of tasks of a type; 0 for an evaluator."""
        return 0 if self.apart else len(self.cluster.get(kind, ()))


def own_task_config() -> TaskConfig:
    """This process's task by its TF_CONFIG; a process of its own if there is none."""
    text = own_tf_config()
    return TaskConfig() if text is None else parse_task_config(text)


def parse_task_config(text: str) -> TaskConfig:
    """The task and the cluster that a TF_CONFIG describes.

    Raises:
        ConfigError: if it has mistakes.
    """
    content = _content(text)
    fields = _other_fields(content)
    if not (content.get("cluster") or content.get(SPARSE)):
        _check_alone(content)
        return TaskConfig(**fields)
    cluster, task = parse_tf_config(text)
    refuse_gaps(cluster, "an Estimator")
    if task is None:
        raise ConfigError(
            f"TF_CONFIG={text!r} does not say which task this process is. Add "
            '"task": {"type": "worker", "index": 0}.'
        )
    fields["evaluated"] = "evaluator" in cluster.addresses
    named = {"chief": "master"} if "master" in content.get("cluster", {}) else {}
    if named and (fields["evaluated"] or task.type == "evaluator"):
        raise ConfigError(
            'TF_CONFIG has a task "master", which evaluates by itself, and an evaluator. Rename '
            '"master" to "chief", or leave the evaluator out.'
        )
    tasks = {
        named.get(kind, kind): [str(address) for address in addresses]
        for kind, addresses in cluster.addresses.items()
        if kind != "evaluator"
    }
    chief = Task(named.get(cluster.chief.type, cluster.chief.type), cluster.chief.index)
    return TaskConfig(tasks, named.get(task.type, task.type), task.index, chief, **fields)


def _content(text: str) -> dict[str, Any]:
    """The object that a TF_CONFIG holds."""
    try:
        content = json.loads(text) if text.strip() else {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        parse_tf_config(text)
        raise ConfigError(f"TF_CONFIG={text!r} is no JSON object.")
    return content


def _other_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a TF_CONFIG other than cluster and task."""
    model_dir, service = content.get("model_dir"), content.get("service")
    if model_dir is not None and not (isinstance(model_dir, str) and model_dir):
        raise ConfigError(
            f'"model_dir": {json.dumps(model_dir)} in TF_CONFIG is no path. Write one, or leave it '
            "out."
        )
    if service is not None and not isinstance(service, dict):
        raise ConfigError(
            f'"service": {json.dumps(service)} in TF_CONFIG is no object. Write '
            '{"key": "value"}, or leave it out.'
        )
    for key in ("session_master", "eval_session_master"):
        if content.get(key):
            raise ConfigError(
                f'"{key}": {json.dumps(content[key])} in TF_CONFIG is not supported: training runs '
                'on the address that "cluster" gives this task, evaluation in this process. Leave '
                "it out."
            )
    return {"model_dir": model_dir, "service": service}


def _check_alone(content: Mapping[str, Any]) -> None:
    """Refuses the task of a cluster that is not there, which would train as a chief."""
    task = content.get("task")
    if task is None or task == {}:
        return
    alone = isinstance(task, dict) and task.get("type", "worker") == "worker"
    if not alone or str(task.get("index", 0)) != "0":
        raise ConfigError(
            f'"task": {json.dumps(task)} in TF_CONFIG is one of several, but there is no '
            '"cluster". List the addresses of all tasks there; or leave the task out, to train in '
            "this process alone."
        )
