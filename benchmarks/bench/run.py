"""Runs jobs, each on a cluster of its own, and collects what they measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.job import Job
from bench.network import isolation

__all__ = ["Measurement", "run"]

_ROOT = Path(__file__).parents[1]
#: How much longer than its job a cluster may take to end by itself.
_GRACE_SECONDS = 15.0
_ERROR_LINES = 6


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one run of one peer cost.

    Attributes:
        job: the run.
        round: in which round it was.
        seconds: wall-clock of the timed steps.
        cpu: seconds of each task.
        sent: bytes through the cluster's network; None where they cannot be told apart.
        packets: likewise.
        iterations: the optimizer's count of updates, those before the timed steps included.
        extra: whatever else the peer returned.
        error: why there is none of this; empty if there is.
    """

    job: Job
    round: int
    seconds: float = 0.0
    cpu: dict[str, float] = dataclasses.field(default_factory=dict)
    sent: int | None = None
    packets: int | None = None
    iterations: int = 0
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.job.steps / self.seconds

    def cpu_per_step(self, *kinds: str) -> float:
        """CPU seconds for each step, of tasks of these types; of all without any."""
        chosen = (s for task, s in self.cpu.items() if not kinds or task.startswith(kinds))
        return sum(chosen) / self.job.steps

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes over the network for each step."""
        return None if self.sent is None else self.sent / self.job.steps

    @property
    def lost(self) -> float:
        """The fraction of the scheduled updates that the optimizer has not counted."""
        return 1.0 - self.iterations / (2 * self.job.steps)


def run(job: Job, number: int) -> Measurement:
    """Runs a job; whatever happens, none of its processes is left when this returns.

    Args:
        job: the run.
        number: the round.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as logs:
        try:
            status, output, errors = _run(job, logs)
        except subprocess.TimeoutExpired:
            return Measurement(job, number, error=f"not done after {job.timeout:g} s")
    if status != 0:
        lines = errors.strip().splitlines()
        shown = lines[:1] + lines[1:][-_ERROR_LINES:]
        return Measurement(job, number, error="\n".join(shown))
    return _measurement(job, number, json.loads(output.strip().splitlines()[-1]))


def _run(job: Job, logs: str) -> tuple[int, str, str]:
    own = "own-network" if isolation().own_network else "shared-network"
    command = (*isolation().prefix, sys.executable, "-m", "bench.cluster", job.to_json(), own, logs)
    cluster = subprocess.Popen(
        command,
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = cluster.communicate(timeout=job.timeout + _GRACE_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(cluster.pid, signal.SIGKILL)
        cluster.wait()
    return cluster.returncode, output, errors


def _measurement(job: Job, number: int, line: dict[str, Any]) -> Measurement:
    names = ("seconds", "cpu", "sent", "packets", "iterations")
    known = {name: line.pop(name) for name in names}
    return Measurement(job, number, **known, extra=line)
