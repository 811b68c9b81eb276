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
from tfdist.cluster.environments.base import Absent, ProcessContext, Roles, TaskAssignment
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = [
    "DETECTORS",
    "ENVIRONMENTS",
    "Detector",
    "Job",
    "Sighting",
    "current_job",
    "detect",
    "resolve",
    "survey",
]


# A process that no launcher has started: alone, on this machine.


def resolve(context: ProcessContext) -> TaskAssignment:
    """The only worker. A launcher that starts several here chooses their addresses itself."""
    del context
    return TaskAssignment(
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
        resolve: its answer for a process.
        within: environments in whose jobs its launcher is commonly started.
    """

    name: str
    resolve: Callable[[ProcessContext], TaskAssignment | Absent]
    within: tuple[str, ...] = ()


#: In the order in which they are asked: what a user names, then those that know who wrote a
#: TF_CONFIG, then those that know all addresses, last those that know the rank alone.
DETECTORS = (
    Detector("hostfile", hostfile.resolve),
    Detector("ray", ray.resolve),
    Detector("sagemaker", sagemaker.resolve),
    Detector("vertex", vertex.resolve),
    Detector("kubernetes", kubernetes.resolve),
    Detector("tf_config", tf_config.resolve),
    Detector("slurm", slurm.resolve),
    Detector("lsf", lsf.resolve),
    Detector("horovod", horovod.resolve, ("slurm", "lsf", "mpi", "sagemaker", "kubernetes")),
    Detector("mpi", mpi.resolve, ("slurm", "lsf", "sagemaker", "kubernetes", "vertex")),
    Detector("local", resolve),
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
    answer: TaskAssignment | Absent | ConfigError


def detect(context: ProcessContext, environment: str | None = None) -> TaskAssignment:
    """The task of this process by its environment.

    Args:
        context: the facts by which environments are recognised.
        environment: one of `ENVIRONMENTS` to ask that one alone; None asks all.

    Raises:
        ConfigError: if a variable has a mistake, two environments disagree, or the one asked for is
            not there.
    """
    if environment is not None:
        return _chosen(context, environment)
    result: TaskAssignment | None = None
    for sighting in survey(context):
        answer, name = sighting.answer, sighting.detector.name
        if isinstance(answer, ConfigError):
            raise ConfigError(
                f"{answer}\n(So says environment {name!r}. If this process belongs to another, "
                "choose that by name.)"
            ) from answer
        if isinstance(answer, TaskAssignment) and (name != "local" or result is None):
            result = answer if result is None else _reconciled(result, answer)
    assert result is not None, "`local` always answers"
    return result


def survey(context: ProcessContext) -> tuple[Sighting, ...]:
    """The answer of each environment, in order; mistakes are answers too."""
    sightings = []
    for detector in DETECTORS:
        answer: TaskAssignment | Absent | ConfigError
        try:
            answer = detector.resolve(context)
        except ConfigError as error:
            answer = error
        sightings.append(Sighting(detector, answer))
    return tuple(sightings)


def _chosen(context: ProcessContext, environment: str) -> TaskAssignment:
    detector = next((each for each in DETECTORS if each.name == environment), None)
    if detector is None:
        raise ConfigError(
            f"environment={environment!r} does not exist. There are: {', '.join(ENVIRONMENTS)}."
        )
    answer = detector.resolve(context)
    if isinstance(answer, Absent):
        raise ConfigError(
            f"environment={environment!r} was asked for, but {answer.reason}. Leave environment "
            "out, or start the process in that environment."
        )
    return answer


def _reconciled(first: TaskAssignment, second: TaskAssignment) -> TaskAssignment:
    """The one of two assignments that counts.

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


def _agree(first: TaskAssignment, second: TaskAssignment) -> bool:
    if first.size != second.size:
        return False
    if dict(first.counts) != dict(second.counts) or first.task is None or second.task is None:
        return True
    return first.task == second.task


# All tasks of this process's job, whichever launcher has started it.


@dataclasses.dataclass(frozen=True)
class Job:
    """A job of several tasks, and which of them this process is.

    Attributes:
        cluster: all tasks.
        task: this one.
        devices: GPUs that each task that computes has for itself; None if not known.
    """

    cluster: ClusterSpec
    task: Task
    devices: int | None


@contextlib.contextmanager
def current_job(
    environ: Mapping[str, str], roles: Roles, chosen: str | None = None
) -> Iterator[Job | None]:
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
    context = ProcessContext(environ=environ, hostname=socket.gethostname(), roles=roles)
    assignment = detect(context, chosen)
    if assignment.size > 1 and assignment.cluster is not None and assignment.task is not None:
        yield Job(assignment.cluster, assignment.task, assignment.devices)
        return
    started = (
        mpi.detect(environ) if assignment.gathers and assignment.environment == "mpi" else None
    )
    if started is None:
        yield None
        return
    with mpi.gathered(started, roles) as (cluster, task):
        yield Job(cluster, task, assignment.devices)
