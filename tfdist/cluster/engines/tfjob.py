"""A job as Kubeflow's TFJob, whose operator makes the pods and writes their TF_CONFIG.

The operator's own words: the container must be called `tensorflow`, and its port `tfjob-port`. The
operator writes no TF_CONFIG for a job of a single task.
"""

from __future__ import annotations

from typing import Any

from tfdist.cluster.engines.manifests import ContainerJob, metadata, pod

__all__ = ["documents"]

_REPLICA_TYPES = {"chief": "Chief", "worker": "Worker", "ps": "PS"}


def documents(job: ContainerJob) -> tuple[dict[str, Any], ...]:
    """The manifest of a job."""
    return (
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "TFJob",
            "metadata": metadata(job, job.name),
            "spec": {
                # All workers have the same result; the first of them to end is not the job's end.
                **({} if job.served else {"successPolicy": "AllWorkers"}),
                # Ends the servers with the job, and leaves the logs of what has ended.
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
                "tfReplicaSpecs": {
                    _REPLICA_TYPES[kind]: _replicas(job, kind) for kind in job.counts
                },
            },
        },
    )


def _replicas(job: ContainerJob, kind: str) -> dict[str, Any]:
    template = pod(job, kind, container="tensorflow", port="tfjob-port")
    # The proxy of Istio, which Kubeflow installs, would outlive the task and keep the job running.
    template["metadata"]["annotations"] = {"sidecar.istio.io/inject": "false"}
    return {"replicas": job.counts[kind], "restartPolicy": "Never", "template": template}
