"""A host of a training job of Amazon SageMaker.

The SageMaker Training Toolkit sets SM_HOSTS, the names of all hosts as JSON, SM_CURRENT_HOST and
SM_NUM_GPUS, and runs the script once on each host. With its own distribution for TensorFlow it also
writes TF_CONFIG, which is then read instead. Hosts are counted by their numbers: algo-2 before
algo-10.
"""

from __future__ import annotations

import json
import re

from tfdist.cluster.environments import tf_config
from tfdist.cluster.environments.base import (
    DEFAULT_PORT,
    Absent,
    ProcessContext,
    TaskAssignment,
    assign_rank,
    number,
    seen,
)
from tfdist.errors import ConfigError

__all__ = ["resolve"]

_SETTER = "the SageMaker Training Toolkit"
_NAMES = ("SM_HOSTS", "SM_CURRENT_HOST", "SM_NUM_GPUS")


def resolve(context: ProcessContext) -> TaskAssignment | Absent:
    """The task of this host.

    Raises:
        ConfigError: if a variable is missing or cannot be read, or this host is not in the list.
    """
    environ = context.environ
    if not environ.get("SM_HOSTS"):
        return Absent("SM_HOSTS is not set")
    devices = number(environ, "SM_NUM_GPUS", _SETTER) if "SM_NUM_GPUS" in environ else 0
    if environ.get("TF_CONFIG"):
        reason = seen(environ, (*_NAMES, "TF_CONFIG"))
        text = environ["TF_CONFIG"]
        return tf_config.resolve_text(context, text, "sagemaker", reason, devices=devices or None)
    hosts = _hosts(environ["SM_HOSTS"])
    own = environ.get("SM_CURRENT_HOST")
    if own not in hosts:
        subject = f"SM_CURRENT_HOST={own!r}" if own else "SM_CURRENT_HOST is not set, so it"
        raise ConfigError(
            f"{subject} is not one of SM_HOSTS={environ['SM_HOSTS']!r}. {_SETTER[4:]} sets both: "
            "run the script as its entry point, or unset SM_HOSTS."
        )
    return assign_rank(
        context,
        environment="sagemaker",
        reason=seen(environ, _NAMES),
        source=f"SM_HOSTS={len(hosts)} hosts",
        hosts=hosts,
        rank=hosts.index(own),
        first_port=DEFAULT_PORT,
        devices=devices or None,
    )


def _hosts(text: str) -> list[str]:
    try:
        hosts = json.loads(text)
    except json.JSONDecodeError:
        hosts = None
    good = isinstance(hosts, list) and hosts and all(isinstance(h, str) and h for h in hosts)
    if not good or len(set(hosts)) != len(hosts):
        raise ConfigError(
            f"SM_HOSTS={text!r} is not a list of different hosts in JSON, such as "
            f'["algo-1", "algo-2"], as {_SETTER} sets it. Unset it elsewhere.'
        )
    return sorted(hosts, key=_natural)


def _natural(host: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", host)
    ]
