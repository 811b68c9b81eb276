"""A pod: of Kubeflow's TFJob, of a StatefulSet, or of an indexed Job.

- TFJob's operator writes TF_CONFIG. Kubernetes itself sets KUBERNETES_SERVICE_HOST in every pod.
- The pods of a StatefulSet are named NAME-0, NAME-1, …, and reach each other as NAME-0.SERVICE
  through the headless service that governs the set. No variable has their number and the service:
  the manifest gives TFDIST_REPLICAS and TFDIST_SERVICE.
- The pods of an indexed Job have their number in JOB_COMPLETION_INDEX and the host names JOB-0,
  JOB-1, …; with a headless service as the pods' `subdomain` they reach each other in the same way.
- If the tasks of different types are different sets of pods, TFDIST_PODS lists them instead of
  TFDIST_REPLICAS: `chief=train-chief:1,worker=train-worker:4,ps=train-ps:2` means that worker 3 is
  the pod train-worker-3. All sets have the one service.

(Kubernetes, "StatefulSets", "Indexed Job for Parallel Processing with Static Work Assignment" and
"Job with Pod-to-Pod Communication".)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist.cluster.environments import tf_config
from tfdist.cluster.environments.base import (
    DEFAULT_PORT,
    Absent,
    ProcessContext,
    TaskAssignment,
    assign_rank,
    check_rank,
    number,
    seen,
)
from tfdist.cluster.spec import TASK_TYPES, Address, ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = ["resolve"]

_REPLICAS, _PODS, _SERVICE = "TFDIST_REPLICAS", "TFDIST_PODS", "TFDIST_SERVICE"
_INDEX = "JOB_COMPLETION_INDEX"
_POD = "KUBERNETES_SERVICE_HOST"


def resolve(context: ProcessContext) -> TaskAssignment | Absent:
    """The task of this pod.

    Raises:
        ConfigError: if a variable is missing or cannot be read, or the pod's name has no number.
    """
    environ = context.environ
    if environ.get(_PODS):
        return _in_sets(context)
    if environ.get(_REPLICAS) or environ.get(_SERVICE):
        return _numbered(context)
    if not environ.get(_POD):
        return Absent(f"neither {_POD} nor {_REPLICAS} nor {_PODS} is set")
    if not environ.get("TF_CONFIG"):
        own = f"{seen(environ, [_INDEX])} is" if environ.get(_INDEX) else f"{_POD} is"
        return Absent(
            f"{own} set, but neither TF_CONFIG nor {_REPLICAS} (or {_PODS}) and {_SERVICE} are"
        )
    reason = seen(environ, [_POD, "TF_CONFIG"])
    return tf_config.resolve_text(context, environ["TF_CONFIG"], "kubernetes", reason)


def _numbered(context: ProcessContext) -> TaskAssignment:
    """The task of a pod whose tasks are the pods of one set."""
    environ = context.environ
    for name, other in ((_REPLICAS, _SERVICE), (_SERVICE, _REPLICAS)):
        _check_with(environ, other, name)
    size = number(environ, _REPLICAS, "the pods' manifest", least=1)
    name, rank, source = _ordinal(environ, context.hostname)
    check_rank(rank, size, source, f"{_REPLICAS}={size}")
    service = environ[_SERVICE].strip(".")
    return assign_rank(
        context,
        environment="kubernetes",
        reason=seen(environ, [_REPLICAS, _SERVICE, _INDEX, "HOSTNAME"]),
        source=f"{_REPLICAS}={size}",
        hosts=[f"{name}-{i}.{service}" for i in range(size)],
        rank=rank,
        first_port=DEFAULT_PORT,
    )


def _in_sets(context: ProcessContext) -> TaskAssignment:
    """The task of a pod whose tasks are the pods of a set for each type."""
    environ = context.environ
    _check_with(environ, _PODS, _SERVICE)
    if environ.get(_REPLICAS):
        raise ConfigError(
            f"{seen(environ, [_REPLICAS])} conflicts with {seen(environ, [_PODS])}, which gives "
            f"the number of pods of each type. Remove {_REPLICAS} from the env of the pods."
        )
    sets = _sets(environ[_PODS])
    counts = {kind: count for kind, (_, count) in sets.items()}
    context.roles.check(counts, _PODS)
    service, port = environ[_SERVICE].strip("."), context.port or DEFAULT_PORT
    cluster = ClusterSpec(
        {
            kind: tuple(Address(f"{name}-{i}.{service}", port) for i in range(count))
            for kind, (name, count) in sets.items()
        }
    )
    return TaskAssignment(
        environment="kubernetes",
        reason=seen(environ, [_PODS, _SERVICE, _INDEX, "HOSTNAME"]),
        counts=counts,
        task=_own(environ, context.hostname, sets),
        cluster=cluster,
    )


def _own(environ: Mapping[str, str], hostname: str, sets: Mapping[str, tuple[str, int]]) -> Task:
    """The task of this pod, which is one of those of the sets."""
    name, index, source = _ordinal(environ, hostname)
    for kind, (prefix, count) in sets.items():
        if prefix == name:
            check_rank(index, count, source, f"{_PODS}={kind}={prefix}:{count}")
            return Task(kind, index)
    raise ConfigError(
        f"HOSTNAME={environ.get('HOSTNAME') or hostname!r} is a pod of {name!r}, which "
        f"{seen(environ, [_PODS])} does not list. Give the names of the Jobs and StatefulSets of "
        "the manifest."
    )


def _sets(text: str) -> dict[str, tuple[str, int]]:
    """For each type of task the name of its pods without the number, and how many there are."""
    sets: dict[str, tuple[str, int]] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)=([-.a-z0-9]+):([0-9]{1,6})\s*", part)
        if match is None or match[1] not in TASK_TYPES or int(match[3]) < 1:
            raise ConfigError(
                f"{_PODS}={text!r} has the part {part!r}, which is not TYPE=NAME:NUMBER, as in "
                f"'worker=train-worker:4'. TYPE is one of {', '.join(TASK_TYPES)}, NAME that of a "
                "Job or StatefulSet, and NUMBER how many pods it has."
            )
        kind, name, count = match[1], match[2], int(match[3])
        if kind in sets or name in (other for other, _ in sets.values()):
            again = kind if kind in sets else name
            raise ConfigError(
                f"{_PODS}={text!r} names {again!r} twice. Give each type of task one set of pods "
                "of its own."
            )
        if kind in ("chief", "evaluator") and count > 1:
            raise ConfigError(
                f"{_PODS}={text!r} has {count} tasks of type {kind}. TensorFlow allows one: write "
                f"'{kind}={name}:1'."
            )
        sets[kind] = name, count
    if not sets.keys() & {"chief", "worker"}:
        raise ConfigError(
            f"{_PODS}={text!r} has no task that computes. Add the pods of type worker."
        )
    return {kind: sets[kind] for kind in TASK_TYPES if kind in sets}


def _check_with(environ: Mapping[str, str], present: str, needed: str) -> None:
    """Refuses one of two variables without the other."""
    if environ.get(needed):
        return
    numbered = f"{_PODS if present == _PODS else _REPLICAS} is their number"
    raise ConfigError(
        f"{seen(environ, [present])} is set, but {needed} is not. Add both to the env of the pods: "
        f"{numbered}, {_SERVICE} the name of the headless service through which they reach each "
        "other."
    )


def _ordinal(environ: Mapping[str, str], hostname: str) -> tuple[str, int, str]:
    """The name that all pods of a set share, this one's number, and where that is from."""
    whole = environ.get("HOSTNAME") or hostname
    match = re.fullmatch(r"(.+)-([0-9]{1,9})", whole.split(".")[0])
    if match is None:
        of = seen(environ, [_PODS] if environ.get(_PODS) else [_REPLICAS])
        raise ConfigError(
            f"HOSTNAME={whole!r} does not end in a number, so it does not tell which of the pods "
            f"of {of} this is. Run them as a StatefulSet, or as a Job with "
            '"completionMode: Indexed".'
        )
    name, rank = match[1], int(match[2])
    if not environ.get(_INDEX):
        return name, rank, f"HOSTNAME={whole}"
    index = number(environ, _INDEX, "Kubernetes")
    if index != rank:
        raise ConfigError(
            f"{_INDEX}={index} conflicts with HOSTNAME={whole!r}, which ends in {rank}. The pods "
            "of an indexed Job have their index in the host name: set no hostname in "
            "the pods' template."
        )
    return name, index, f"{_INDEX}={index}"
