"""A process that `horovodrun` has started with Gloo: its rank, but not where the others are.

Horovod's launcher sets HOROVOD_RANK and HOROVOD_SIZE, and the address of a rendezvous through which
Horovod's own library finds the others (horovod/runner/gloo_run.py). With `--mpi` it starts
`mpirun`, whose variables have the same information.
"""

from __future__ import annotations

from tfdist.cluster.environments.base import (
    Absent,
    ProcessContext,
    TaskAssignment,
    check_rank,
    number,
    seen,
)
from tfdist.errors import ConfigError

__all__ = ["resolve"]

_RANK, _SIZE = "HOROVOD_RANK", "HOROVOD_SIZE"


def resolve(context: ProcessContext) -> TaskAssignment | Absent:
    """The rank that `horovodrun` has given this process; its cluster is not known here.

    Raises:
        ConfigError: if only one of the variables is set, or they are not numbers.
    """
    environ = context.environ
    there = [name for name in (_RANK, _SIZE) if environ.get(name)]
    if not there:
        return Absent(f"{_RANK} is not set")
    if len(there) == 1:
        missing = _SIZE if there == [_RANK] else _RANK
        raise ConfigError(
            f"{seen(environ, there)} is set, but {missing} is not; horovodrun sets both. Unset "
            f"{there[0]}, or start with horovodrun."
        )
    rank = number(environ, _RANK, "horovodrun")
    size = number(environ, _SIZE, "horovodrun", least=1)
    source = f"{_SIZE}={size}"
    check_rank(rank, size, f"{_RANK}={rank}", source)
    return TaskAssignment(
        environment="horovod",
        reason=seen(environ, [_RANK, _SIZE, "HOROVOD_GLOO_RENDEZVOUS_ADDR"]),
        counts=context.roles.counts(size, source),
        task=context.roles.task(rank, size, source),
        devices=1,
    )
