"""A process that `mpirun` has started: its rank, and how it learns where the others are.

The launchers set the rank of a process in the environment, each under names of its own, but not the
addresses of the others. MPI itself is used once to exchange these, and ended before all else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.cluster.environments.base import (
    Absent,
    ProcessContext,
    Roles,
    TaskAssignment,
    check_rank,
    seen,
)
from tfdist.cluster.ports import HeldPorts
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = ["MpiRank", "detect", "gathered", "resolve"]

#: The variables of rank and size: Open MPI, then MPICH, Intel MPI and others that use Hydra.
_VARIABLES = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH (PMI)": ("PMI_RANK", "PMI_SIZE"),
}


@dataclasses.dataclass(frozen=True)
class MpiRank:
    """The ranks that the launcher has set for this process.

    Attributes:
        launcher: which MPI it is, for messages.
        rank: this process's number.
        size: the number of processes.
    """

    launcher: str
    rank: int
    size: int


def detect(environ: Mapping[str, str]) -> MpiRank | None:
    """The rank that an MPI launcher has given this process, or None.

    Raises:
        ConfigError: if the variables are not numbers.
    """
    for launcher, (rank, size) in _VARIABLES.items():
        if rank in environ and size in environ:
            try:
                return MpiRank(launcher, int(environ[rank]), int(environ[size]))
            except ValueError:
                raise ConfigError(
                    f"{rank}={environ[rank]!r} and {size}={environ[size]!r}, which {launcher} sets "
                    "for its processes, are no whole numbers. Unset them, or start with mpirun."
                ) from None
    return None


def resolve(context: ProcessContext) -> TaskAssignment | Absent:
    """The rank that an MPI launcher has given this process; `gathered` finds the others.

    Raises:
        ConfigError: if the variables are not numbers, or contradict each other.
    """
    started = detect(context.environ)
    if started is None:
        return Absent(f"neither {' nor '.join(rank for rank, _ in _VARIABLES.values())} is set")
    rank, size = _VARIABLES[started.launcher]
    source = f"{size}={started.size}"
    check_rank(started.rank, started.size, f"{rank}={started.rank}", source)
    return TaskAssignment(
        environment="mpi",
        reason=seen(context.environ, [rank, size]),
        counts=context.roles.counts(started.size, source),
        task=context.roles.task(started.rank, started.size, source),
    )


@contextlib.contextmanager
def gathered(launched: MpiRank, roles: Roles | None = None) -> Iterator[tuple[ClusterSpec, Task]]:
    """All processes of the launcher as a cluster; this one's port is held within.

    Every process must call it: they wait for each other in MPI.

    Args:
        launched: this process's rank.
        roles: which ranks get which role; all are workers by default.

    Raises:
        ConfigError: if mpi4py or the MPI library cannot be loaded, or does not agree.
    """
    mpi = _mpi()
    with HeldPorts(1) as held:
        if not mpi.Is_initialized():
            mpi.Init()
        world = mpi.COMM_WORLD
        rank, size = world.Get_rank(), world.Get_size()
        own = (_host(), held.ports[0])
        everyone = world.allgather(own) if size > 1 else [own]
        mpi.Finalize()
        if (rank, size) != (launched.rank, launched.size):
            raise ConfigError(
                f"{launched.launcher} says that this is rank {launched.rank} of {launched.size}, "
                f"but the MPI library of mpi4py takes it for rank {rank} of {size}. They belong to "
                "different installations of MPI: start with the mpirun of that library, or name "
                "the library of this mpirun in MPI4PY_LIBMPI."
            )
        alone = len({host for host, _ in everyone}) == 1
        addresses = tuple(Address("127.0.0.1" if alone else host, port) for host, port in everyone)
        asked, source = roles or Roles(), f"{launched.launcher}'s {size}"
        yield asked.cluster(addresses, source), asked.task(rank, size, source)


def _mpi() -> Any:
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ImportError as error:
        raise ConfigError(
            f"mpirun has started this process, and mpi4py, by which it finds the others, cannot "
            f"be loaded ({error}). Run: pip install mpi4py"
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            f"mpirun has started this process, but mpi4py does not find the MPI library: {error} "
            "Name it in MPI4PY_LIBMPI, such as /usr/lib/x86_64-linux-gnu/libmpi.so.40."
        ) from error
    return MPI


def _host() -> str:
    """This host's address as others reach it, or its name if that has none but loopback."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
        if not address.startswith("127."):
            return address
    return name
