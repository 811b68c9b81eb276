"""All environments in one order, and what to do if several match.

The first that matches answers. Another that also matches must agree: count as many tasks, and,
if it deals out the same roles, name the same task. If not, that is an error which names both,
but for two cases:

- A launcher that was started inside a job of another one, such as `mpirun` in a job of Slurm: the
  outer one's variables are then about the launcher, the inner one's about this process, and count.
- A job of one task, such as an interactive shell: it describes no cluster.

`environment` chooses one by name, and no other is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator, Mapping

from tfdist.cluster.environments import (
    horovod,
    hostfile,
    kubernetes,
    lsf,
    mpi,
    ray,
    sagemaker,
    slurm,
    tf_config,
    vertex,
)
from tfdist.cluster.environments.base import Absent, Place, Roles, Surroundings
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = [
    "DETECTORS",
    "ENVIRONMENTS",
    "Detector",
    "Found",
    "Sighting",
    "detect",
    "found",
    "place",
    "survey",
]


# A process that no launcher has started: alone, on this machine.


def place(given: Surroundings) -> Place:
    """The only worker. A launcher that starts several here chooses their addresses itself."""
    del given
    return Place(
        environment="local",
        reason="nothing else is found",
        counts={"worker": 1},
        task=Task("worker", 0),
    )


@dataclasses.dataclass(frozen=True)
class Detector:
    """One environment.

    Attributes:
        name: its name.
        place: its answer for a process.
        within: environments in whose jobs its launcher is commonly started.
    """

    name: str
    place: Callable[[Surroundings], Place | Absent]
    within: tuple[str, ...] = ()


#: In the order in which they are asked: what a user names, then those that know who wrote a
#: TF_CONFIG, then those that know all addresses, last those that know the rank alone.
DETECTORS = (
    Detector("hostfile", hostfile.place),
    Detector("ray", ray.place),
    Detector("sagemaker", sagemaker.place),
    Detector("vertex", vertex.place),
    Detector("kubernetes", kubernetes.place),
    Detector("tf_config", tf_config.place),
    Detector("slurm", slurm.place),
    Detector("lsf", lsf.place),
    Detector("horovod", horovod.place, ("slurm", "lsf", "mpi", "sagemaker", "kubernetes")),
    Detector("mpi", mpi.place, ("slurm", "lsf", "sagemaker", "kubernetes", "vertex")),
    Detector("local", place),
)

#: The names by which an environment is chosen.
ENVIRONMENTS = tuple(detector.name for detector in DETECTORS)

_WITHIN = {detector.name: detector.within for detector in DETECTORS}


@dataclasses.dataclass(frozen=True)
class Sighting:
    """The answer of one environment.

    Attributes:
        detector: the environment.
        answer: its answer, or the mistake that keeps it from one.
    """

    detector: Detector
    answer: Place | Absent | ConfigError


def detect(given: Surroundings, environment: str | None = None) -> Place:
    """The place of this process.

    Args:
        given: the facts by which environments are recognised.
        environment: one of `ENVIRONMENTS` to ask that one alone; None asks all.

    Raises:
        ConfigError: if a variable has a mistake, two environments disagree, or the one asked for is
            not there.
    """
    if environment is not None:
        return _chosen(given, environment)
    found: Place | None = None
    for sighting in survey(given):
        answer, name = sighting.answer, sighting.detector.name
        if isinstance(answer, ConfigError):
            raise ConfigError(
                f"{answer}\n(So says environment {name!r}. If this process belongs to another, "
                "choose that by name.)"
            ) from answer
        if isinstance(answer, Place) and (name != "local" or found is None):
            found = answer if found is None else _reconciled(found, answer)
    assert found is not None, "`local` always answers"
    return found


def survey(given: Surroundings) -> tuple[Sighting, ...]:
    """The answer of each environment, in order; mistakes are answers too."""
    sightings = []
    for detector in DETECTORS:
        answer: Place | Absent | ConfigError
        try:
            answer = detector.place(given)
        except ConfigError as error:
            answer = error
        sightings.append(Sighting(detector, answer))
    return tuple(sightings)


def _chosen(given: Surroundings, environment: str) -> Place:
    detector = next((each for each in DETECTORS if each.name == environment), None)
    if detector is None:
        raise ConfigError(
            f"environment={environment!r} does not exist. There are: {', '.join(ENVIRONMENTS)}."
        )
    answer = detector.place(given)
    if isinstance(answer, Absent):
        raise ConfigError(
            f"environment={environment!r} was asked for, but {answer.reason}. Leave environment "
            "out, or start the process in that environment."
        )
    return answer


def _reconciled(first: Place, second: Place) -> Place:
    """The one of two places that counts.

    Raises:
        ConfigError: if they contradict each other.
    """
    inside = first.environment in _WITHIN[second.environment]
    if _agree(first, second):
        return second if first.gathers and inside else first
    if inside:
        return second
    if second.environment in _WITHIN[first.environment] or second.size == 1:
        return first
    raise ConfigError(
        f"Two environments disagree about this process: it is {first}, and {second}. Choose with "
        f"environment={first.environment!r} or environment={second.environment!r} (on the command "
        f"line --environment {first.environment}), or unset the variables of the other."
    )


def _agree(first: Place, second: Place) -> bool:
    if first.size != second.size:
        return False
    if dict(first.counts) != dict(second.counts) or first.task is None or second.task is None:
        return True
    return first.task == second.task


# All tasks of this process's job, whichever launcher has started it.


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

    This process's port is held within the block if it was chosen here.

    Args:
        environ: the process's environment.
        roles: which ranks get which role.
        chosen: the name of the environment to believe; None looks for all.

    Returns:
        None if this process is alone, or only Horovod knows where the others are.

    Raises:
        ConfigError: if two environments contradict each other, or one has a mistake.
    """
    given = Surroundings(environ=environ, hostname=socket.gethostname(), roles=roles)
    place = detect(given, chosen)
    if place.size > 1 and place.cluster is not None and place.task is not None:
        yield Found(place.cluster, place.task, place.devices)
        return
    started = mpi.detect(environ) if place.gathers and place.environment == "mpi" else None
    if started is None:
        yield None
        return
    with mpi.gathered(started, roles) as (cluster, task):
        yield Found(cluster, task, place.devices)
