"""Runs one job on a cluster: `python -m bench.cluster JOB own-network|shared-network LOGS`.

Starts the servers, then the chief, whose line of JSON goes to the standard output; ends them all
with the chief. If anything fails, the last lines of the failed task go to the standard error.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.catalog import environ_of
from bench.job import Job
from bench.network import bring_loopback_up
from bench.slow import slowed
from tfdist import environment
from tfdist.cluster.ports import HeldPorts

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.05
_TAIL_LINES = 25
_KILL_SECONDS = 10.0


class _JobError(Exception):
    """The job did not come to its end; the text says why."""


def main(job: Job, own_network: bool, logs: Path) -> int:
    """Runs a job.

    Args:
        job: the run.
        own_network: whether this process is in a network namespace of its own.
        logs: directory for what the tasks print.

    Returns:
        The exit status.
    """
    if own_network:
        bring_loopback_up()
    try:
        print(_run(job, own_network, logs), flush=True)
    except _JobError as failure:
        print(failure, file=sys.stderr, flush=True)
        return 1
    return 0


def _run(job: Job, own_network: bool, logs: Path) -> str:
    deadline = time.monotonic() + job.timeout
    names = [f"ps-{i}" for i in range(job.ps)] + [f"worker-{i}" for i in range(job.workers)]
    with HeldPorts(len(names) + 1) as ports, contextlib.ExitStack() as stack:
        addresses = dict(zip(["chief-0", *names], map(str, ports.addresses), strict=True))
        tasks: dict[str, subprocess.Popen[bytes]] = {}
        for name in names:
            tasks[name] = stack.enter_context(_task(job, name, addresses, logs, {}))
        cluster = {
            "tasks": {name: task.pid for name, task in tasks.items()},
            "own_network": own_network,
        }
        tasks["chief-0"] = stack.enter_context(_task(job, "chief-0", addresses, logs, cluster))
        for name, factor in job.slow.items():
            stack.enter_context(slowed(tasks[name].pid, factor))
        return _wait(job, tasks, logs, deadline)


@contextlib.contextmanager
def _task(
    job: Job, name: str, addresses: dict[str, str], logs: Path, cluster: dict[str, object]
) -> Iterator[subprocess.Popen[bytes]]:
    kind, _, index = name.rpartition("-")
    spec: dict[str, list[str]] = {}
    for other, address in addresses.items():
        spec.setdefault(other.rpartition("-")[0], []).append(address)
    changes = {
        "TF_CONFIG": json.dumps({"cluster": spec, "task": {"type": kind, "index": int(index)}}),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_USE_LEGACY_KERAS": None,
        "PYTHONUNBUFFERED": "1",
        # As TensorFlow's guide says: a worker that is not up yet is waited for.
        "GRPC_FAIL_FAST": "use_caller",
        **environ_of(job.peer),
    }
    command = (sys.executable, "-m", "bench.task", job.to_json(), json.dumps(cluster))
    with (logs / f"{name}.out").open("wb") as out, (logs / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment.merged(changes), stdout=out, stderr=err
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(_KILL_SECONDS)


def _wait(job: Job, tasks: dict[str, subprocess.Popen[bytes]], logs: Path, deadline: float) -> str:
    """The chief's line of JSON, once it has ended."""
    while time.monotonic() < deadline:
        ended = [name for name, task in tasks.items() if task.poll() is not None]
        if tasks["chief-0"].returncode == 0:
            return (logs / "chief-0.out").read_text().strip().splitlines()[-1]
        if ended:
            status = tasks[ended[-1]].returncode
            raise _JobError(
                f"{job.peer}: {ended[-1]} ended with {status}.\n{_tail(logs, ended[-1])}"
            )
        time.sleep(_POLL_SECONDS)
    raise _JobError(
        f"{job.peer}: the chief was not done after {job.timeout:g} s.\n{_tail(logs, 'chief-0')}"
    )


def _tail(logs: Path, name: str) -> str:
    lines = (logs / f"{name}.err").read_text(errors="replace").splitlines()
    return "\n".join(f"    {line[:300]}" for line in lines[-_TAIL_LINES:])


if __name__ == "__main__":
    sys.exit(main(Job.from_json(sys.argv[1]), sys.argv[2] == "own-network", Path(sys.argv[3])))
