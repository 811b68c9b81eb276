"""From ranks on hosts to a place: what all schedulers have in common that number their tasks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tfdist.cluster.addresses import Address
from tfdist.cluster.environments.places import Place, Surroundings
from tfdist.errors import ConfigError

__all__ = ["DEFAULT_PORT", "addresses", "check_rank", "number", "place_of_rank", "same_host"]

#: The port of TensorFlow's tasks where nobody names another, as Kubeflow and Vertex AI have it.
DEFAULT_PORT = 2222


def number(environ: Mapping[str, str], name: str, setter: str, least: int = 0) -> int:
    """The whole number that a variable holds.

    Args:
        environ: environment variables; the name must be among them.
        name: the variable.
        setter: who sets it, for messages, such as `Slurm's srun`.
        least: the least number that makes sense.

    Raises:
        ConfigError: if it holds none.
    """
    text = environ[name].strip()
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < least:
        raise ConfigError(
            f"{name}={environ[name]!r} is no whole number of {least} or more, as {setter} sets it. "
            "Unset it, or start the tasks with that launcher."
        )
    return int(text)


def check_rank(rank: int, size: int, rank_source: str, size_source: str) -> None:
    """Refuses a rank outside of its cluster.

    Raises:
        ConfigError: naming the two variables.
    """
    if rank >= size:
        raise ConfigError(
            f"{rank_source} is not below the number of tasks, {size} by {size_source}. They belong "
            "to different jobs: unset both, or start the tasks with one launcher."
        )


def addresses(hosts: Sequence[str], first_port: int, source: str) -> tuple[Address, ...]:
    """The addresses of all ranks: tasks of one host have the ports from `first_port` on.

    Args:
        hosts: each rank's host.
        first_port: the port of the first task of each host.
        source: what says that there are so many, for messages.

    Raises:
        ConfigError: if there are more tasks on a host than ports are left, or no port is given.
    """
    if not 0 < first_port < 65536:
        raise ConfigError(f"port={first_port} is not a port. Give a number from 1 to 65535.")
    used: defaultdict[str, int] = defaultdict(int)
    found = []
    for host in hosts:
        found.append(Address(host, first_port + used[host]))
        used[host] += 1
    if found and max(address.port for address in found) > 65535:
        raise ConfigError(
            f"port={first_port} leaves no ports for the {max(used.values())} tasks that {source} "
            f"puts on one host. Give a port of {65536 - max(used.values())} or less."
        )
    return tuple(found)


def place_of_rank(
    given: Surroundings,
    *,
    environment: str,
    reason: str,
    source: str,
    hosts: Sequence[str],
    rank: int,
    first_port: int,
    devices: int | None = None,
) -> Place:
    """The place of one rank of a cluster whose hosts are known.

    Args:
        given: the roles and, where the user named one, the port.
        environment: the environment's name.
        reason: the variables that were seen.
        source: what gives the number of tasks, for messages.
        hosts: each rank's host.
        rank: this process's rank, below their number.
        first_port: the first port on each host where the user named none.
        devices: GPUs of each task that computes.
    """
    roles = given.roles
    listed = addresses(hosts, first_port if given.port is None else given.port, source)
    return Place(
        environment=environment,
        reason=reason,
        counts=roles.counts(len(hosts), source),
        task=roles.task(rank, len(hosts), source),
        cluster=roles.cluster(listed, source),
        devices=devices,
    )


def same_host(one: str, other: str) -> bool:
    """Whether two names may be of one host: equal, or one is the other's first label."""
    one, other = one.lower().rstrip("."), other.lower().rstrip(".")
    return one == other or one.split(".")[0] == other or other.split(".")[0] == one
