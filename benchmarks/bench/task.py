"""The program of one task: `python -m bench.task JOB TASKS`, with TF_CONFIG in its environment."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from bench.job import Job
from bench.measure import Meter
from tfdist import environment

__all__ = ["main"]


def main(job: Job, cluster: dict[str, Any]) -> None:
    """Serves, or, on the chief, trains and prints one line of JSON.

    Args:
        job: the run.
        cluster: what the chief needs for its meter: `tasks`, the process id of each other task by
            its name, and `own_network`. Empty on the others.
    """
    peer = importlib.import_module(f"bench.peers.{job.peer}")
    kind = json.loads(environment.read("TF_CONFIG") or "{}")["task"]["type"]
    if kind != "chief":
        peer.serve(job)
        return
    tasks = {**cluster["tasks"], "chief-0": os.getpid()}
    meter = Meter(tasks, cluster["own_network"])
    result = peer.train(job, meter)
    cost = meter.cost
    if cost is None:
        raise RuntimeError(f"{job.peer}.train() returned without Meter.start() and stop().")
    line = {**vars(cost), **result}
    print(json.dumps(line), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main(Job.from_json(sys.argv[1]), json.loads(sys.argv[2]))
