"""Starts the processes of a job, reads what they measured, and leaves none of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.pair.job import Pair
from bench.pair.peers import PEERS, environ_of
from tfdist import environment

__all__ = ["Measured", "measure"]

_TASK = Path(__file__).with_name("task.py")
_ERROR_LINES = 12
_GRACE_SECONDS = 10.0
_LOOK_SECONDS = 0.4
#: One thread for each process, and bytecode for this checkout as installed libraries have it.
_ENVIRON = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "PYTHONDONTWRITEBYTECODE": "",
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one start of one peer measured.

    Attributes:
        job: the start.
        round: in which round it was.
        load: the machine's load average before it.
        busy: the share of all cores that was in use right before it.
        started: seconds from the command to the end of the first update that was trained; None
            without a training.
        exchanges: median seconds of an all-reduce, by size.
        trainings: by workload: `rate`, updates a second; `cpu`, seconds of rank 0's for an update;
            `loss`, after the last; `peak`, rank 0's largest resident memory so far, in bytes.
        idle: the share of a core that rank 0 needs while it does nothing.
        entered: seconds from the command to the first line of the program.
        error: why there is none of this; empty if there is.
    """

    job: Pair
    round: int
    load: float
    exchanges: dict[str, float] = dataclasses.field(default_factory=dict)
    trainings: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    idle: float = 0.0
    busy: float = 0.0
    started: float | None = None
    entered: float = 0.0
    error: str = ""


def measure(job: Pair, number: int) -> Measured:
    """Runs a job.

    Args:
        job: the job.
        number: the round.
    """
    load, busy = os.getloadavg()[0], _busy()
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as directory:
        place = Path(directory)
        (place / "job.json").write_text(job.to_json())
        with (place / "output").open("wb") as output:
            begun = time.time()
            status = _run(job, place, output)
        if status == 0:
            found: dict[str, Any] = json.loads((place / "result.json").read_text())
            first, entered = found.pop("first"), found.pop("entered") - begun
            times = {"started": None if first is None else first - begun, "entered": entered}
            return Measured(job, number, load, busy=busy, **times, **found)
        said = (place / "output").read_text(errors="replace").strip().splitlines()
    return Measured(
        job, number, load, busy=busy, error=f"{status}:\n" + "\n".join(said[-_ERROR_LINES:])
    )


def _run(job: Pair, place: Path, output: Any) -> int | str:
    script = [str(_TASK), str(place / "job.json"), str(place / "result.json")]
    pair = subprocess.Popen(
        PEERS[job.peer].start(script, job.processes),
        cwd=place,
        env=environment.merged({**_ENVIRON, **environ_of(job.peer), **job.environ}),
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


def _busy() -> float:
    """The share of all cores that something else uses, seen over a moment."""
    before = _ticks()
    time.sleep(_LOOK_SECONDS)
    used, passed = (now - then for now, then in zip(_ticks(), before, strict=True))
    return used / passed if passed else 0.0


def _ticks() -> tuple[int, int]:
    """The ticks that all cores have worked, and all ticks, since the machine started."""
    numbers = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(numbers) - sum(numbers[3:5]), sum(numbers)
