"""A program: two processes of an installed Horovod add up two tensors.

`python -m tfdist.horovod.installer.smoke_test` starts Horovod's rendezvous server and the two, and
ends with status 0 if both have the right sum. A process of its own, so that the Horovod that is
tried out need not be the one that tfdist would import.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tfdist import environment
from tfdist.cluster.spec import Address, ClusterSpec
from tfdist.horovod.installer.commands import Commands
from tfdist.strategies.horovod import rendezvous

__all__ = ["MODULE", "SECONDS", "main", "verify"]

#: The name by which `python -m` runs this.
MODULE = "tfdist.horovod.installer.smoke_test"

_PROCESSES = 2
_LOCAL = "127.0.0.1"
_SECONDS_TO_MEET = 60
_POLL = 0.1


def main() -> int:
    """Starts the two and returns 0 if both succeed. The first failure ends both."""
    ports = range(1, 1 + _PROCESSES)  # Nobody listens there; addresses must differ.
    cluster = ClusterSpec({"worker": tuple(Address(_LOCAL, port) for port in ports)})
    offered = rendezvous.offer(cluster)
    command = [sys.executable, "-m", MODULE, "rank"]
    started = []
    for task, _ in cluster.tasks():
        variables = rendezvous.meeting(cluster, task, offered, {})
        variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(_SECONDS_TO_MEET)
        started.append(subprocess.Popen(command, env=environment.merged(variables)))
    try:
        while None in (statuses := [process.poll() for process in started]) and not any(statuses):
            time.sleep(_POLL)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return max(map(abs, filter(None, statuses)), default=0)


def _add_up() -> int:
    """One of the two: 0 if it has the sum of both values."""
    import horovod.tensorflow as horovod
    import tensorflow

    horovod.init()
    values = tensorflow.constant([1.0, 2.0, 3.0]) * (horovod.rank() + 1)
    total = horovod.allreduce(values, op=horovod.Sum).numpy().tolist()
    rank, size = horovod.rank(), horovod.size()
    horovod.shutdown()
    sys.stdout.write(f"rank {rank} of {size}: the sum is {total}\n")
    return 0 if (size, total) == (_PROCESSES, [3.0, 6.0, 9.0]) else 1


if __name__ == "__main__":
    sys.exit(_add_up() if sys.argv[1:] == ["rank"] else main())


# Tries a Horovod out: an all-reduce of two processes over Gloo on this machine's loopback.

#: For three processes that import TensorFlow, on a machine that has other things to do.
SECONDS = 180.0


def verify(commands: Commands, folder: Path | None = None, seconds: float = SECONDS) -> None:
    """Lets two processes of the Horovod in a folder, by default the installed one, add up tensors.

    Raises:
        CommandError: if they do not get the right sum in time.
    """
    environ = environment.snapshot()
    changes: dict[str, str | None] = {
        name: None for name in environ if name.startswith("HOROVOD_") or name == "TF_CONFIG"
    }
    if folder is not None:
        paths = (str(folder), environ.get("PYTHONPATH", ""))
        changes["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    changes |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    commands.run(
        "The test of Horovod, an all-reduce of two processes,",
        [sys.executable, "-m", MODULE],
        changes=changes,
        seconds=seconds,
        hint="Nothing was installed.",
    )
