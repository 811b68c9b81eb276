"""A pod: of Kubeflow's TFJob, of a StatefulSet, or of an indexed Job.

- TFJob's operator writes TF_CONFIG. Kubernetes itself sets KUBERNETES_SERVICE_HOST in every pod.
- The pods of a StatefulSet are named NAME-0, NAME-1, …, and reach each other as NAME-0.SERVICE
  through the headless service that governs the set. No variable tells their number and the service:
  the manifest gives TFDIST_REPLICAS and TFDIST_SERVICE.
- The pods of an indexed Job have their number in JOB_COMPLETION_INDEX and the host names JOB-0,
  JOB-1, …; with a headless service as the pods' `subdomain` they reach each other in the same way.

(Kubernetes, "StatefulSets", "Indexed Job for Parallel Processing with Static Work Assignment" and
"Job with Pod-to-Pod Communication".)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist.cluster.environments import tf_config
from tfdist.cluster.environments.places import Absent, Place, Surroundings, seen
from tfdist.cluster.environments.ranking import DEFAULT_PORT, check_rank, number, place_of_rank
from tfdist.errors import ConfigError

__all__ = ["place"]

_REPLICAS, _SERVICE, _INDEX = "TFDIST_REPLICAS", "TFDIST_SERVICE", "JOB_COMPLETION_INDEX"
_POD = "KUBERNETES_SERVICE_HOST"


def place(given: Surroundings) -> Place | Absent:
    """The task of this pod.

    Raises:
        ConfigError: if a variable is missing or cannot be read, or the pod's name has no number.
    """
    environ = given.environ
    if environ.get(_REPLICAS) or environ.get(_SERVICE):
        return _numbered(given)
    if not environ.get(_POD):
        return Absent(f"neither {_POD} nor {_REPLICAS} is set")
    if not environ.get("TF_CONFIG"):
        own = f"{seen(environ, [_INDEX])} is" if environ.get(_INDEX) else f"{_POD} is"
        return Absent(f"{own} set, but neither TF_CONFIG nor {_REPLICAS} and {_SERVICE} are")
    reason = seen(environ, [_POD, "TF_CONFIG"])
    return tf_config.place_in(given, environ["TF_CONFIG"], "kubernetes", reason)


def _numbered(given: Surroundings) -> Place:
    environ = given.environ
    for name, other in ((_REPLICAS, _SERVICE), (_SERVICE, _REPLICAS)):
        if not environ.get(name):
            raise ConfigError(
                f"{seen(environ, [other])} is set, but {name} is not. Add both to the env of the "
                f"pods: {_REPLICAS} is their number, {_SERVICE} the name of the headless service "
                "through which they reach each other."
            )
    size = number(environ, _REPLICAS, "the pods' manifest", least=1)
    name, rank, source = _ordinal(environ, given.hostname)
    check_rank(rank, size, source, f"{_REPLICAS}={size}")
    service = environ[_SERVICE].strip(".")
    return place_of_rank(
        given,
        environment="kubernetes",
        reason=seen(environ, [_REPLICAS, _SERVICE, _INDEX, "HOSTNAME"]),
        source=f"{_REPLICAS}={size}",
        hosts=[f"{name}-{i}.{service}" for i in range(size)],
        rank=rank,
        first_port=DEFAULT_PORT,
    )


def _ordinal(environ: Mapping[str, str], hostname: str) -> tuple[str, int, str]:
    """The name that all pods share, this one's number, and where that is from."""
    whole = environ.get("HOSTNAME") or hostname
    found = re.fullmatch(r"(.+)-([0-9]{1,9})", whole.split(".")[0])
    if found is None:
        raise ConfigError(
            f"HOSTNAME={whole!r} does not end in a number, so it does not tell which of the "
            f"{_REPLICAS}={environ[_REPLICAS]} pods this is. Run them as a StatefulSet, or as a "
            'Job with "completionMode: Indexed".'
        )
    name, rank = found[1], int(found[2])
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
