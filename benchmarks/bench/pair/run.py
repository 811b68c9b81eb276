"""Starts a pair, reads what it measured, and leaves none of its processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.pair.job import Pair
from bench.pair.peers import PEERS, environ_of
from tfdist import environment

__all__ = ["Measured", "measure"]

_TASK = Path(__file__).with_name("task.py")
_ERROR_LINES = 12
_GRACE_SECONDS = 10.0
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one start of one peer measured.

    Attributes:
        job: the start.
        round: in which round it was.
        load: the machine's load average before it.
        exchanges: median seconds of an all-reduce, by size.
        trainings: by workload: `rate`, updates a second; `cpu`, seconds of rank 0's for an update;
            `loss`, after the last.
        idle: the share of a core that rank 0 needs while it does nothing.
        error: why there is none of this; empty if there is.
    """

    job: Pair
    round: int
    load: float
    exchanges: dict[str, float] = dataclasses.field(default_factory=dict)
    trainings: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    idle: float = 0.0
    error: str = ""


def measure(job: Pair, number: int) -> Measured:
    """Runs a job.

    Args:
        job: the job.
        number: the round.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as directory:
        place = Path(directory)
        (place / "job.json").write_text(job.to_json())
        with (place / "output").open("wb") as output:
            status = _run(job, place, output)
        if status == 0:
            found: dict[str, Any] = json.loads((place / "result.json").read_text())
            return Measured(job, number, load, **found)
        said = (place / "output").read_text(errors="replace").strip().splitlines()
    return Measured(job, number, load, error=f"{status}:\n" + "\n".join(said[-_ERROR_LINES:]))


def _run(job: Pair, place: Path, output: Any) -> int | str:
    script = [str(_TASK), str(place / "job.json"), str(place / "result.json")]
    pair = subprocess.Popen(
        PEERS[job.peer].start(script),
        cwd=place,
        env=environment.merged({**_THREADS, **environ_of(job.peer), **job.environ}),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return pair.wait(job.timeout)
    except subprocess.TimeoutExpired:
        return f"not done after {job.timeout:g} s"
    finally:
        _end(pair)


def _end(pair: subprocess.Popen[bytes]) -> None:
    """Lets the launcher end its processes, which may be in sessions of their own."""
    pair.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        pair.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pair.pid, signal.SIGKILL)
    pair.wait()
