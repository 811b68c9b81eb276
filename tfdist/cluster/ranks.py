"""Where a task stands among those that compute: in all, on its host, and across hosts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from tfdist.cluster.spec import ClusterSpec, Task

__all__ = ["Rank", "on_hosts", "rank_of", "ranks"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """A process's numbers, as Horovod and MPI count them.

    Attributes:
        host: the host's name or address.
        rank: its number among all processes.
        size: the number of all processes.
        local_rank: its number among the processes of its host.
        local_size: the number of processes of its host.
        cross_rank: its number among the processes that have its `local_rank` on their hosts.
        cross_size: the number of these.
    """

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def ranks(cluster: ClusterSpec) -> tuple[Rank, ...]:
    """The ranks of the tasks that compute, in their order.

    Tasks belong to one host if their addresses say so in the same words.
    """
    hosts = [a.host for task, a in cluster.tasks() if task.type in ("chief", "worker")]
    on_local: Counter[int] = Counter()
    places = []
    for host, (local, count) in zip(hosts, on_hosts(hosts), strict=True):
        places.append((host, local, count, on_local[local]))
        on_local[local] += 1
    return tuple(
        Rank(
            host=host,
            rank=i,
            size=len(hosts),
            local_rank=local,
            local_size=count,
            cross_rank=cross,
            cross_size=on_local[local],
        )
        for i, (host, local, count, cross) in enumerate(places)
    )


def on_hosts(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """For each process its number on its host, and how many that host has.

    Args:
        hosts: the host of each process, in the order of their ranks.
    """
    counts, seen = Counter(hosts), Counter[str]()
    found = []
    for host in hosts:
        found.append((seen[host], counts[host]))
        seen[host] += 1
    return found


def rank_of(cluster: ClusterSpec, task: Task) -> Rank:
    """The rank of one task.

    Raises:
        ValueError: if it is not among those that compute.
    """
    return ranks(cluster)[cluster.computing.index(task)]
