"""All tasks of this process's job, by whatever has started it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator, Mapping

from tfdist.cluster.environments import detection, mpi
from tfdist.cluster.environments.places import Place, Roles, Surroundings
from tfdist.cluster.spec import ClusterSpec, Task

__all__ = ["Found", "found"]


@dataclasses.dataclass(frozen=True)
class Found:
    """A job of several tasks, and this process's place in it.

    Attributes:
        cluster: all tasks.
        task: this one.
        devices: GPUs that each task that computes has for itself; None if not known.
    """

    cluster: ClusterSpec
    task: Task
    devices: int | None


@contextlib.contextmanager
def found(
    environ: Mapping[str, str], roles: Roles, chosen: str | None = None
) -> Iterator[Found | None]:
    """The tasks of this process's job, from the scheduler or, under `mpirun`, from each other.

    This process's port is held within the block where it was chosen here.

    Args:
        environ: the process's environment.
        roles: which ranks get which role.
        chosen: the name of the environment to believe; None looks for all.

    Returns:
        None where this process is alone, or only Horovod knows where the others are.

    Raises:
        ConfigError: if two environments contradict each other, or one has a mistake.
    """
    given = Surroundings(environ=environ, hostname=socket.gethostname(), roles=roles)
    place = detection.detect(given, chosen)
    if place.size > 1 and place.cluster is not None and place.task is not None:
        yield Found(place.cluster, place.task, place.devices)
        return
    started = _by_mpi(place, environ)
    if started is None:
        yield None
        return
    with mpi.gathered(started, roles) as (cluster, task):
        yield Found(cluster, task, place.devices)


def _by_mpi(place: Place, environ: Mapping[str, str]) -> mpi.MpiRank | None:
    return mpi.detect(environ) if place.gathers and place.environment == "mpi" else None
