"""A process that Ray has started, as Ray Train does for TensorFlow.

Ray Train's `TensorflowTrainer` collects an address from each of its workers and sets TF_CONFIG in
all of them. Ray sets RAY_JOB_ID and RAY_RAYLET_PID in each worker process. Actors of one's own have
no TF_CONFIG: who starts them knows their hosts and gives them to `explicit`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.cluster.environments import tf_config
from tfdist.cluster.environments.base import (
    DEFAULT_PORT,
    Absent,
    ProcessContext,
    Roles,
    TaskAssignment,
    assign_rank,
    check_rank,
    seen,
)

__all__ = ["explicit", "resolve"]

_MARKS = ("RAY_JOB_ID", "RAY_RAYLET_PID")


def resolve(context: ProcessContext) -> TaskAssignment | Absent:
    """The task that Ray Train has given this process.

    Raises:
        ConfigError: if TF_CONFIG has mistakes of form.
    """
    environ = context.environ
    marks = seen(environ, _MARKS)
    if not marks:
        return Absent("RAY_JOB_ID is not set")
    text = environ.get("TF_CONFIG")
    if not text:
        return Absent(f"{marks} is set, but TF_CONFIG is not, as TensorflowTrainer sets it")
    return tf_config.resolve_text(context, text, "ray", seen(environ, (*_MARKS, "TF_CONFIG")))


def explicit(
    hosts: Sequence[str], rank: int, *, roles: Roles | None = None, port: int = DEFAULT_PORT
) -> TaskAssignment:
    """The task of an actor of one's own.

    Example:
        hosts = ray.get([actor.host.remote() for actor in actors])   # ray.util.get_node_ip_address
        assignments = [explicit(hosts, rank) for rank in range(len(hosts))]

    Args:
        hosts: the host of each actor, in the order of their ranks.
        rank: this actor's rank.
        roles: which ranks get which role.
        port: the first port on each host.

    Raises:
        ConfigError: if the rank is not one of theirs, or no task is left that computes.
    """
    source = f"hosts of {len(hosts)} actors"
    check_rank(rank, len(hosts), f"rank={rank}", source)
    return assign_rank(
        ProcessContext(environ={}, roles=roles or Roles()),
        environment="ray",
        reason=f"rank={rank} of {len(hosts)} actors, given by the program",
        source=source,
        hosts=hosts,
        rank=rank,
        first_port=port,
    )
