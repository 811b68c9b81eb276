"""Where a task stands among those that compute: in all, on its host, and across hosts."""

from __future__ import annotations

import dataclasses
from collections import Counter

from tfdist.cluster.spec import ClusterSpec, Task

__all__ = ["Rank", "rank_of", "ranks"]


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
    on_host, on_local = Counter(hosts), Counter[int]()
    seen: Counter[str] = Counter()
    places = []
    for host in hosts:
        local = seen[host]
        places.append((host, local, on_local[local]))
        seen[host] += 1
        on_local[local] += 1
    return tuple(
        Rank(
            host=host,
            rank=i,
            size=len(hosts),
            local_rank=local,
            local_size=on_host[host],
            cross_rank=cross,
            cross_size=on_local[local],
        )
        for i, (host, local, cross) in enumerate(places)
    )


def rank_of(cluster: ClusterSpec, task: Task) -> Rank:
    """The rank of one task.

    Raises:
        ValueError: if it is not among those that compute.
    """
    return ranks(cluster)[cluster.computing.index(task)]
