"""The program of one process: `python task.py JOB-FILE RESULT-FILE`."""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# `bench` is found behind the installed packages: beside it, horovod.py would stand for Horovod.
sys.path[0:1] = []
sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.pair.job import SIZES, WORKLOADS, Exchange, Pair, Workload  # noqa: E402
from bench.pair.peers import PEERS  # noqa: E402

_WARM_CALLS = 5
_IDLE_SECONDS = 1.0


def main(job: Pair, result: Path) -> None:
    """Measures what the job asks for; rank 0 writes it to a file.

    Args:
        job: the job.
        result: the file.
    """
    entered = time.time()
    module = importlib.import_module(f"bench.pair.{PEERS[job.peer].module}")
    process = module.start(job)
    clocks = {name: _Clock() for name in job.workloads}
    found: dict[str, Any] = {
        "exchanges": {name: _exchange(process, SIZES[name]) for name in job.sizes},
        "trainings": {
            name: _train(process, WORKLOADS[name], job.blocks, clock)
            for name, clock in clocks.items()
        },
        "entered": entered,
        "first": next((clock.first for clock in clocks.values()), None),
        "idle": _idle() if job.sizes else 0.0,
    }
    if process.rank == 0:
        result.write_text(json.dumps(found))
    process.exchange(1)()
    process.close()


def _exchange(process: Any, exchange: Exchange) -> float:
    """Median seconds of an all-reduce."""
    call = process.exchange(exchange.count)
    for _ in range(_WARM_CALLS):
        call()
    took = []
    for _ in range(exchange.repeats):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _train(process: Any, workload: Workload, blocks: int, clock: _Clock) -> dict[str, float]:
    loss = process.train(workload, 1 + blocks, clock)
    steps = workload.steps
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if not blocks:
        return {"loss": loss, "peak": peak}
    return {
        "rate": steps / statistics.median(clock.seconds[1:]),
        "cpu": statistics.median(clock.cpu[1:]) / steps,
        "loss": loss,
        "peak": peak,
    }


class _Clock:
    """Takes the time of each block of steps. Peers call `start` and `stop` around each."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.first: float | None = None

    def start(self) -> None:
        self._began, self._had = time.perf_counter(), _cpu()

    def stop(self) -> None:
        self.first = self.first or time.time()
        self.seconds.append(time.perf_counter() - self._began)
        self.cpu.append(_cpu() - self._had)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _idle() -> float:
    """The share of a core that the process needs while it does nothing."""
    before = _cpu()
    time.sleep(_IDLE_SECONDS)
    return (_cpu() - before) / _IDLE_SECONDS


if __name__ == "__main__":
    main(Pair.from_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
