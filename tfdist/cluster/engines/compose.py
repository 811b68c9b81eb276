"""A job for Docker Compose: one service for each task, on one machine.

The services find each other by their names in the network that Compose makes; no port of the
machine is taken. Every task waits for the others by itself, so nothing has to be started in order.
"""

from __future__ import annotations

from typing import Any

from tfdist.cluster.engines.manifests import ContainerJob, literal
from tfdist.cluster.environments.ranking import DEFAULT_PORT
from tfdist.cluster.spec import Address, ClusterSpec, Task

__all__ = ["RUN", "document"]

#: Runs the file. All services end by themselves when the training has ended, and so does this; it
#: ends them where one has failed.
RUN = "docker compose -f FILE up --abort-on-container-failure"


def document(job: ContainerJob) -> dict[str, Any]:
    """The Compose file of a job."""
    cluster = ClusterSpec(
        {
            kind: tuple(Address(f"{kind}-{i}", DEFAULT_PORT) for i in range(count))
            for kind, count in job.counts.items()
        }
    )
    services = {
        f"{task.type}-{task.index}": _service(job, cluster, task) for task, _ in cluster.tasks()
    }
    return {"name": job.name, "services": services}


def _service(job: ContainerJob, cluster: ClusterSpec, task: Task) -> dict[str, Any]:
    gpus = job.gpus_of(task.type)
    place = {} if job.alone else {"environment": {"TF_CONFIG": cluster.tf_config(task)}}
    return {
        "image": job.image,
        "command": [literal(word) for word in job.command],
        **place,
        "stop_grace_period": f"{job.stop_seconds}s",
        **({"deploy": {"resources": {"reservations": _devices(gpus)}}} if gpus else {}),
    }


def _devices(gpus: int) -> dict[str, Any]:
    return {"devices": [{"driver": "nvidia", "count": gpus, "capabilities": ["gpu"]}]}
