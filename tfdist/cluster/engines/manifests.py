"""A job in containers, and what all manifests of it have in common.

Manifests are nested dictionaries. They become text at the very end, as YAML where PyYAML is
installed and else as JSON, which every reader of YAML takes too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from tfdist.cluster.environments.ranking import DEFAULT_PORT
from tfdist.errors import ConfigError

__all__ = [
    "JOB_LABEL",
    "ContainerJob",
    "check_name",
    "in_json",
    "labels",
    "literal",
    "metadata",
    "name_of",
    "pod",
    "text",
]

#: The label by which everything of a job is found again.
JOB_LABEL = "tfdist-job"
_TASK_LABEL = "tfdist-task"

#: What is left of the 63 characters of a host name beside `-worker-` and a number, and of those
#: of a label beside `-ps-` and the hash that a StatefulSet adds.
_LONGEST_NAME = 49

#: Columns of YAML: commands are not broken.
_WIDTH = 1000

#: Seconds that a launcher in a pod needs besides the grace that it gives its task.
_SECONDS_TO_END = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContainerJob:
    """A job whose tasks each run in a container.

    Attributes:
        name: what it is called; see `check_name`.
        image: the container image.
        command: the program and its arguments, the same for all tasks.
        counts: how many tasks there are of each type, in the order of their ranks.
        gpus: GPUs of each task that trains; 0 asks for none.
        namespace: Kubernetes' namespace, or None for that of whoever applies the manifest.
        grace: seconds between TERM and KILL when the job is stopped.

    Raises:
        ConfigError: if the name cannot be one.
    """

    name: str
    image: str
    command: tuple[str, ...]
    counts: Mapping[str, int]
    gpus: int = 0
    namespace: str | None = None
    grace: float = 5.0

    def __post_init__(self) -> None:
        check_name(self.name, "--job-name")
        if self.namespace is not None:
            _check_label(self.namespace, "--namespace", 63, letter=False)

    @property
    def served(self) -> bool:
        """Whether the chief has parameter servers, so that it trains nothing itself."""
        return "ps" in self.counts

    @property
    def alone(self) -> bool:
        """Whether there is one task, which has nobody to find."""
        return sum(self.counts.values()) == 1

    @property
    def main(self) -> str:
        """The type of the task whose output the user sees."""
        return next(iter(self.counts))

    @property
    def stop_seconds(self) -> int:
        """Seconds that a container gets to end: its launcher gives its task the grace first."""
        return math.ceil(self.grace) + _SECONDS_TO_END

    def gpus_of(self, kind: str) -> int:
        """GPUs of each task of a type."""
        trains = kind == "worker" or (kind == "chief" and not self.served)
        return self.gpus if trains else 0


def name_of(script: str) -> str:
    """A name for the job of a script: `My Model.py` becomes `my-model`."""
    words = re.sub(r"[^a-z0-9]+", "-", PurePath(script).stem.lower()).strip("-")
    named = words if words[:1].isalpha() else f"job-{words}"
    return named[:_LONGEST_NAME].strip("-")


def check_name(name: str, flag: str) -> None:
    """Refuses what Kubernetes does not take as a name of services (RFC 1035).

    Raises:
        ConfigError: if it has other characters than it may, or too many.
    """
    _check_label(name, flag, _LONGEST_NAME, letter=True)


def _check_label(name: str, flag: str, longest: int, *, letter: bool) -> None:
    first = "[a-z]" if letter else "[a-z0-9]"
    if len(name) <= longest and re.fullmatch(rf"{first}([-a-z0-9]*[a-z0-9])?", name):
        return
    begin = "a letter" if letter else "a letter or digit"
    raise ConfigError(
        f"{flag} {name!r} is no name for Kubernetes. Give at most {longest} small letters, digits "
        f"and hyphens that begin with {begin} and do not end in a hyphen."
    )


def labels(job: ContainerJob, kind: str | None = None) -> dict[str, str]:
    """The labels of all that belongs to a job, or to its tasks of one type."""
    return {JOB_LABEL: job.name} | ({_TASK_LABEL: kind} if kind is not None else {})


def metadata(job: ContainerJob, name: str, kind: str | None = None) -> dict[str, Any]:
    """The `metadata` of an object."""
    where = {} if job.namespace is None else {"namespace": job.namespace}
    return {"name": name, **where, "labels": labels(job, kind)}


def pod(job: ContainerJob, kind: str, *, container: str, port: str, **more: Any) -> dict[str, Any]:
    """The pod `template` of the tasks of one type.

    Args:
        job: the job.
        kind: the type.
        container: the name of the one container.
        port: the name of its port.
        more: further fields of the container.
    """
    gpus = job.gpus_of(kind)
    limits = {"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}
    return {
        "metadata": {"labels": labels(job, kind)},
        "spec": {
            "terminationGracePeriodSeconds": job.stop_seconds,
            "containers": [
                {
                    "name": container,
                    "image": job.image,
                    "command": [literal(word) for word in job.command],
                    **more,
                    "ports": [{"name": port, "containerPort": DEFAULT_PORT}],
                    **limits,
                }
            ],
        },
    }


def literal(word: str) -> str:
    """A word as it is written where `$` begins the name of a variable.

    Kubernetes replaces `$(NAME)` and Compose `${NAME}`; both read `$$` as one `$`.
    """
    return word.replace("$", "$$")


def text(documents: Sequence[Mapping[str, Any]]) -> str:
    """Manifests as text."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        return in_json(documents)
    written: str = yaml.safe_dump_all(
        documents, sort_keys=False, default_flow_style=None, width=_WIDTH
    )
    return written


def in_json(documents: Sequence[Mapping[str, Any]]) -> str:
    """Manifests as one JSON text, which `kubectl` reads as well."""
    if len(documents) == 1:
        return json.dumps(documents[0], indent=2) + "\n"
    whole = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
    return json.dumps(whole, indent=2) + "\n"
