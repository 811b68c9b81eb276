"""A job with the objects that every Kubernetes has: indexed Jobs, StatefulSet, headless service.

- Workers are an indexed Job: pod i is worker i. One pod that fails makes the Job fail, and
  Kubernetes then ends its other pods: a lost task leaves the others without a partner.
- With parameter servers the chief has a Job of its own, which therefore asks for no GPUs and whose
  end is the end of the job. The servers are a StatefulSet.
- Through the headless service, named as the job, all pods have names that are known before they
  run: POD.JOB. It also publishes those that are not ready yet, as none is before all have met.

A StatefulSet starts its pods again whenever they end, so it stays until it is deleted, with what
has the label `tfdist-job`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from tfdist.cluster.environments.base import DEFAULT_PORT
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = [
    "JOB_LABEL",
    "RUN",
    "ContainerJob",
    "check_name",
    "compose_document",
    "documents",
    "in_json",
    "jobs",
    "name_of",
    "text",
    "tfjob_documents",
]


# A job in containers, and the common parts of all its manifests.
#
# Manifests are nested dictionaries. They become text at the very end, as YAML if PyYAML is
# installed and else as JSON, which every reader of YAML takes too.

#: The label by which everything of a job is found again.
JOB_LABEL = "tfdist-job"
_TASK_LABEL = "tfdist-task"

#: The rest of the 63 characters of a host name beside `-worker-` and a number, and of those
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
        name: the name of its objects; see `check_name`.
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
        check_name(self.name)
        if self.namespace is not None:
            _check_label(self.namespace, "--namespace", 63, letter=False)

    @property
    def has_servers(self) -> bool:
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
        trains = kind == "worker" or (kind == "chief" and not self.has_servers)
        return self.gpus if trains else 0


def name_of(script: str) -> str:
    """A name for the job of a script: `My Model.py` becomes `my-model`."""
    words = re.sub(r"[^a-z0-9]+", "-", PurePath(script).stem.lower()).strip("-")
    named = words if words[:1].isalpha() else f"job-{words}"
    return named[:_LONGEST_NAME].strip("-")


def check_name(name: str) -> None:
    """Rejects names that Kubernetes does not take for services (RFC 1035).

    Raises:
        ConfigError: if it has other characters than it may, or too many.
    """
    _check_label(name, "--job-name", _LONGEST_NAME, letter=True)


def _check_label(name: str, flag: str, longest: int, *, letter: bool) -> None:
    first = "[a-z]" if letter else "[a-z0-9]"
    if len(name) <= longest and re.fullmatch(rf"{first}([-a-z0-9]*[a-z0-9])?", name):
        return
    begin = "a letter" if letter else "a letter or digit"
    raise ConfigError(
        f"{flag} {name!r} is no name for Kubernetes. Give at most {longest} small letters, digits "
        f"and hyphens that begin with {begin} and do not end in a hyphen."
    )


def _labels(job: ContainerJob, kind: str | None = None) -> dict[str, str]:
    """The labels of all that belongs to a job, or to its tasks of one type."""
    return {JOB_LABEL: job.name} | ({_TASK_LABEL: kind} if kind is not None else {})


def _metadata(job: ContainerJob, name: str, kind: str | None = None) -> dict[str, Any]:
    """The `metadata` of an object."""
    where = {} if job.namespace is None else {"namespace": job.namespace}
    return {"name": name, **where, "labels": _labels(job, kind)}


def _pod(job: ContainerJob, kind: str, *, container: str, port: str, **more: Any) -> dict[str, Any]:
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
        "metadata": {"labels": _labels(job, kind)},
        "spec": {
            "terminationGracePeriodSeconds": job.stop_seconds,
            "containers": [
                {
                    "name": container,
                    "image": job.image,
                    "command": [_literal(word) for word in job.command],
                    **more,
                    "ports": [{"name": port, "containerPort": DEFAULT_PORT}],
                    **limits,
                }
            ],
        },
    }


def _literal(word: str) -> str:
    """Escapes a word for texts in which `$` begins the name of a variable.

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


def documents(job: ContainerJob) -> tuple[dict[str, Any], ...]:
    """The manifests of a job, in the order in which they are to be made."""
    sets = [
        _stateful_set(job, kind) if kind == "ps" else _indexed_job(job, kind) for kind in job.counts
    ]
    return tuple(sets) if job.alone else (_service(job), *sets)


def jobs(job: ContainerJob) -> tuple[str, ...]:
    """The names of the Jobs of a job; the job is done when the first of them is."""
    return tuple(_set(job, kind) for kind in job.counts if kind != "ps")


def _set(job: ContainerJob, kind: str) -> str:
    """The name of a type's pods, without their numbers."""
    return f"{job.name}-{kind}" if job.has_servers else job.name


def _service(job: ContainerJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(job),
            "ports": [{"name": "tensorflow", "port": DEFAULT_PORT}],
        },
    }


def _indexed_job(job: ContainerJob, kind: str) -> dict[str, Any]:
    template = _template(job, kind)
    if not job.alone:
        template["spec"] = {"subdomain": job.name, **template["spec"]}
    template["spec"] = {"restartPolicy": "Never", **template["spec"]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, _set(job, kind), kind),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.counts[kind],
            "parallelism": job.counts[kind],
            "backoffLimit": 0,
            "template": template,
        },
    }


def _stateful_set(job: ContainerJob, kind: str) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(job, _set(job, kind), kind),
        "spec": {
            "serviceName": job.name,
            "replicas": job.counts[kind],
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _labels(job, kind)},
            "template": _template(job, kind),
        },
    }


def _template(job: ContainerJob, kind: str) -> dict[str, Any]:
    others = {} if job.alone else {"env": _variables(job)}
    return _pod(job, kind, container="task", port="tensorflow", **others)


def _variables(job: ContainerJob) -> list[dict[str, str]]:
    """The variables by which a pod finds the others: `tfdist.cluster.environments.kubernetes`."""
    if job.has_servers:
        sets = ",".join(f"{kind}={_set(job, kind)}:{count}" for kind, count in job.counts.items())
        who = {"name": "TFDIST_PODS", "value": sets}
    else:
        who = {"name": "TFDIST_REPLICAS", "value": str(sum(job.counts.values()))}
    return [who, {"name": "TFDIST_SERVICE", "value": job.name}]


# A job for Docker Compose: one service for each task, on one machine.
#
# The services find each other by their names in the network that Compose makes; no port of the
# machine is taken. Every task waits for the others by itself, so nothing has to be started in
# order.

#: Runs the file. All services end by themselves when the training has ended, and so does this; it
#: ends them if one has failed.
RUN = "docker compose -f FILE up --abort-on-container-failure"


def compose_document(job: ContainerJob) -> dict[str, Any]:
    """The Compose file of a job."""
    cluster = ClusterSpec(
        {
            kind: tuple(Address(f"{kind}-{i}", DEFAULT_PORT) for i in range(count))
            for kind, count in job.counts.items()
        }
    )
    services = {
        f"{task.type}-{task.index}": _compose_service(job, cluster, task)
        for task, _ in cluster.tasks()
    }
    return {"name": job.name, "services": services}


def _compose_service(job: ContainerJob, cluster: ClusterSpec, task: Task) -> dict[str, Any]:
    gpus = job.gpus_of(task.type)
    device = {"driver": "nvidia", "count": gpus, "capabilities": ["gpu"]}
    environment = {} if job.alone else {"environment": {"TF_CONFIG": cluster.tf_config(task)}}
    return {
        "image": job.image,
        "command": [_literal(word) for word in job.command],
        **environment,
        "stop_grace_period": f"{job.stop_seconds}s",
        **({"deploy": {"resources": {"reservations": {"devices": [device]}}}} if gpus else {}),
    }


# A job as Kubeflow's TFJob, whose operator makes the pods and writes their TF_CONFIG.
#
# The operator's own words: the container must be called `tensorflow`, and its port `tfjob-port`.
# The operator writes no TF_CONFIG for a job of a single task.

_REPLICA_TYPES = {"chief": "Chief", "worker": "Worker", "ps": "PS"}


def tfjob_documents(job: ContainerJob) -> tuple[dict[str, Any], ...]:
    """The manifest of a job."""
    return (
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "TFJob",
            "metadata": _metadata(job, job.name),
            "spec": {
                # All workers have the same result; the first of them to end is not the job's end.
                **({} if job.has_servers else {"successPolicy": "AllWorkers"}),
                # Ends the servers with the job, and leaves the logs of the pods that have ended.
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
                "tfReplicaSpecs": {
                    _REPLICA_TYPES[kind]: _replicas(job, kind) for kind in job.counts
                },
            },
        },
    )


def _replicas(job: ContainerJob, kind: str) -> dict[str, Any]:
    template = _pod(job, kind, container="tensorflow", port="tfjob-port")
    # The proxy of Istio, which Kubeflow installs, would outlive the task and keep the job running.
    template["metadata"]["annotations"] = {"sidecar.istio.io/inject": "false"}
    return {"replicas": job.counts[kind], "restartPolicy": "Never", "template": template}
