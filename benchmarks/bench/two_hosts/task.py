"""The program of one host: `python task.py JOB`, the job as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

# `bench` is found behind the installed packages: beside it, horovod.py would stand for Horovod.
sys.path[0:1] = []
sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.two_hosts.clock import Clock  # noqa: E402
from bench.two_hosts.job import PEERS, Job  # noqa: E402


def main(job: Job) -> None:
    """Trains, and on rank 0 writes what was measured."""
    kind = "torch_task" if PEERS[job.peer].library == "torch" else "keras_task"
    clock = Clock()
    importlib.import_module(f"bench.two_hosts.{kind}").train(job, clock)
    if job.rank == 0:
        Path(job.result).write_text(json.dumps(clock.result()))


if __name__ == "__main__":
    main(Job.from_json(sys.argv[1]))
