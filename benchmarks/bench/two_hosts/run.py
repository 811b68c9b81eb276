"""Starts one peer on two hosts and reads what it measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.two_hosts.job import BLOCK, PEERS, Job
from bench.two_hosts.network import ADDRESSES, DEVICE, RATES, two_hosts
from tfdist import environment

__all__ = ["Measured", "measure"]

_TASK = Path(__file__).with_name("task.py")
_PORTS = (23450, 23451)
_ERROR_LINES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What one start measured.

    Attributes:
        peer: a key of `PEERS`.
        model: `"mlp"` or `"transformer"`.
        network: a key of `RATES`.
        round: in which round it was.
        blocks: seconds, bytes sent by rank 0's host, and loss of each; the first is not timed.
        error: why there are none; empty if there are.
    """

    peer: str
    model: str
    network: str
    round: int
    blocks: list[dict[str, Any]]
    error: str = ""

    @property
    def rate(self) -> float:
        """Updates a second, median of the timed blocks."""
        return BLOCK / statistics.median(block["seconds"] for block in self.blocks[1:])

    @property
    def sent(self) -> float:
        """Bytes that a host sends in an update."""
        return statistics.mean(block["sent"] for block in self.blocks[1:]) / BLOCK

    def loss_within(self, seconds: float) -> float:
        """The loss of the last block that ended in so much training time, the first left out."""
        passed, loss = 0.0, self.blocks[0]["loss"]
        for block in self.blocks[1:]:
            passed += block["seconds"]
            if passed > seconds * 1.001:
                break
            loss = block["loss"]
        return float(loss)


def measure(
    peer: str, model: str, network: str, number: int, blocks: int, timeout: float
) -> Measured:
    """Runs a peer on a network of its own.

    Args:
        peer: a key of `PEERS`.
        model: `"mlp"` or `"transformer"`.
        network: a key of `RATES`.
        number: the round.
        blocks: timed blocks.
        timeout: seconds until it is killed and counts as failed.
    """
    known = {"peer": peer, "model": model, "network": network, "round": number}
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as directory:
        place = Path(directory)
        jobs = [
            Job(
                peer=peer,
                model=model,
                rank=rank,
                ports=_PORTS,
                blocks=blocks,
                result=str(place / "result.json"),
            )
            for rank in range(2)
        ]
        with two_hosts(RATES[network]) as prefixes:
            error = _run(jobs, prefixes, place, timeout)
        if not error:
            found = json.loads((place / "result.json").read_text())
            return Measured(**known, blocks=found)  # type: ignore[arg-type]
    return Measured(**known, blocks=[], error=error)  # type: ignore[arg-type]


def _run(jobs: list[Job], prefixes: Any, place: Path, timeout: float) -> str:
    """Runs both hosts; returns why it failed, or an empty text."""
    outputs = [place / f"output{job.rank}" for job in jobs]
    started = []
    try:
        for job, prefix, path in zip(jobs, prefixes, outputs, strict=True):
            core = ["taskset", "-c", str(job.rank % (os.cpu_count() or 1))]
            with path.open("wb") as output:
                started.append(
                    subprocess.Popen(
                        [*prefix, *core, sys.executable, str(_TASK), job.to_json()],
                        env=environment.merged(_environ(job)),
                        cwd=place,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        failed = _failure(started, timeout)
    finally:
        for task in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.pid, signal.SIGKILL)
            task.wait()
    if failed is None:
        return ""
    rank, how = failed
    return f"rank {rank} {how}\n{_tail(outputs[rank])}"


def _failure(tasks: list[subprocess.Popen[bytes]], timeout: float) -> tuple[int, str] | None:
    """Waits for all to end, or one to fail: which failed, and how; None if none did."""
    deadline = time.monotonic() + timeout
    while True:
        statuses = [task.poll() for task in tasks]
        for rank, status in enumerate(statuses):
            if status:
                return rank, f"ended with {status}"
        if None not in statuses:
            return None
        if time.monotonic() > deadline:
            return statuses.index(None), f"was not done after {timeout:g} s"
        time.sleep(0.2)


def _environ(job: Job) -> dict[str, str]:
    hosts = [f"{a}:{port}" for a, port in zip(ADDRESSES, job.ports, strict=True)]
    config = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": job.rank}}
    return {
        "TF_CONFIG": json.dumps(config) if PEERS[job.peer].library != "torch" else "{}",
        "GLOO_SOCKET_IFNAME": DEVICE,
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return "\n".join(lines[-_ERROR_LINES:])
