"""All environments in one order, and what to do where several match.

The first that matches answers. Another that also matches must agree: count as many tasks, and,
where it deals out the same roles, name the same task. If not, that is an error which names both,
but for two cases:

- A launcher that was started inside a job of another one, such as `mpirun` in a job of Slurm: the
  outer one's variables are then about the launcher, the inner one's about this process, and count.
- A job of one task, such as an interactive shell: it says nothing about a cluster.

`environment` chooses one by name, and no other is asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tfdist.cluster.environments import (
    horovod,
    hostfile,
    kubernetes,
    local,
    lsf,
    mpi,
    ray,
    sagemaker,
    slurm,
    tf_config,
    vertex,
)
from tfdist.cluster.environments.places import Absent, Place, Surroundings
from tfdist.errors import ConfigError

__all__ = ["DETECTORS", "ENVIRONMENTS", "Detector", "Sighting", "detect", "survey"]


@dataclasses.dataclass(frozen=True)
class Detector:
    """One environment.

    Attributes:
        name: what it is called.
        place: its answer for a process.
        why_here: why it stands where it stands in the order.
        within: environments in whose jobs its launcher is commonly started.
    """

    name: str
    place: Callable[[Surroundings], Place | Absent]
    why_here: str
    within: tuple[str, ...] = ()


#: In the order in which they are asked.
DETECTORS = (
    Detector("hostfile", hostfile.place, "only where the user names a file"),
    Detector("ray", ray.place, "TF_CONFIG, and who wrote it"),
    Detector("sagemaker", sagemaker.place, "TF_CONFIG, and who wrote it; else its own variables"),
    Detector("vertex", vertex.place, "TF_CONFIG, and who wrote it; else its own variable"),
    Detector("kubernetes", kubernetes.place, "TF_CONFIG, and who wrote it; else the manifest's"),
    Detector("tf_config", tf_config.place, "made for this very process"),
    Detector("slurm", slurm.place, "knows all addresses"),
    Detector("lsf", lsf.place, "knows all addresses, mostly"),
    Detector(
        "horovod",
        horovod.place,
        "knows the rank alone",
        within=("slurm", "lsf", "mpi", "sagemaker", "kubernetes"),
    ),
    Detector(
        "mpi",
        mpi.place,
        "knows the rank alone",
        within=("slurm", "lsf", "sagemaker", "kubernetes", "vertex"),
    ),
    Detector("local", local.place, "where nothing else is found"),
)

#: The names by which an environment is chosen.
ENVIRONMENTS = tuple(detector.name for detector in DETECTORS)

_WITHIN = {detector.name: detector.within for detector in DETECTORS}


@dataclasses.dataclass(frozen=True)
class Sighting:
    """What one environment says.

    Attributes:
        detector: the environment.
        answer: its answer, or the mistake that keeps it from one.
    """

    detector: Detector
    answer: Place | Absent | ConfigError


def detect(given: Surroundings, environment: str | None = None) -> Place:
    """Who this process is.

    Args:
        given: what environments are recognised by.
        environment: one of `ENVIRONMENTS` to ask that one alone; None asks all.

    Raises:
        ConfigError: if a variable has a mistake, two environments disagree, or the one asked for is
            not there.
    """
    if environment is not None:
        return _chosen(given, environment)
    found: Place | None = None
    for detector in DETECTORS:
        if detector.name == "local" and found is not None:
            break
        try:
            answer = detector.place(given)
        except ConfigError as error:
            raise ConfigError(
                f"{error}\n(So says environment {detector.name!r}. If this process belongs to "
                "another, choose that by name.)"
            ) from error
        if isinstance(answer, Place):
            found = answer if found is None else _reconciled(found, answer)
    if found is None:  # `local` always answers.
        raise AssertionError("no environment")
    return found


def survey(given: Surroundings) -> tuple[Sighting, ...]:
    """What each environment says, in order; mistakes are answers too."""
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
