"""A job with what every Kubernetes has: indexed Jobs, a StatefulSet, and a headless service.

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

from typing import Any

from tfdist.cluster.engines.manifests import ContainerJob, labels, metadata, pod
from tfdist.cluster.environments.ranking import DEFAULT_PORT

__all__ = ["documents", "jobs"]


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
    """What the pods of a type are called, but for their numbers."""
    return f"{job.name}-{kind}" if job.served else job.name


def _service(job: ContainerJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(job),
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
        "metadata": metadata(job, _set(job, kind), kind),
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
        "metadata": metadata(job, _set(job, kind), kind),
        "spec": {
            "serviceName": job.name,
            "replicas": job.counts[kind],
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels(job, kind)},
            "template": _template(job, kind),
        },
    }


def _template(job: ContainerJob, kind: str) -> dict[str, Any]:
    others = {} if job.alone else {"env": _variables(job)}
    return pod(job, kind, container="task", port="tensorflow", **others)


def _variables(job: ContainerJob) -> list[dict[str, str]]:
    """What tells a pod who the others are (see `tfdist.cluster.environments.kubernetes`)."""
    if job.served:
        sets = ",".join(f"{kind}={_set(job, kind)}:{count}" for kind, count in job.counts.items())
        who = {"name": "TFDIST_PODS", "value": sets}
    else:
        who = {"name": "TFDIST_REPLICAS", "value": str(sum(job.counts.values()))}
    return [who, {"name": "TFDIST_SERVICE", "value": job.name}]
