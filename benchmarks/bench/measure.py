"""What the timed steps cost: wall-clock, CPU of all tasks, bytes over the loopback interface."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Cost", "Meter"]

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Cost:
    """What happened between a meter's start and its stop.

    Attributes:
        seconds: wall-clock.
        cpu: user and system seconds of each task and its children, by the task's name.
        sent: bytes through `lo`; None where the network is not the cluster's own.
        packets: packets through `lo`, likewise.
    """

    seconds: float
    cpu: dict[str, float]
    sent: int | None
    packets: int | None


class Meter:
    """Measures the steps between `start` and `stop`. A peer calls each of them once.

    Args:
        tasks: the process id of each task of the cluster, by its name.
        own_network: whether nothing but the cluster uses this `lo`.
    """

    def __init__(self, tasks: Mapping[str, int], own_network: bool) -> None:
        self._tasks = dict(tasks)
        self._own_network = own_network
        self._before: Cost | None = None
        self.cost: Cost | None = None

    def start(self) -> None:
        """The steps that are not timed are all applied; the timed ones come now."""
        if self._before is not None:
            raise RuntimeError("Meter.start() was called twice.")
        self._before = self._read()

    def stop(self) -> None:
        """All timed steps are applied."""
        if self._before is None or self.cost is not None:
            raise RuntimeError("Meter.stop() is called once, after Meter.start().")
        now, then = self._read(), self._before
        self.cost = Cost(
            now.seconds - then.seconds,
            {name: now.cpu[name] - then.cpu[name] for name in now.cpu},
            None if now.sent is None or then.sent is None else now.sent - then.sent,
            None if now.packets is None or then.packets is None else now.packets - then.packets,
        )

    def _read(self) -> Cost:
        sent, packets = _loopback() if self._own_network else (None, None)
        seconds = time.perf_counter()
        return Cost(seconds, _cpu(self._tasks), sent, packets)


def _loopback() -> tuple[int, int]:
    """Bytes and packets that `lo` of this network namespace has received since it began.

    Each packet is counted once: what `lo` sends it also receives.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            fields = counters.split()
            return int(fields[0]), int(fields[1])
    raise RuntimeError("/proc/self/net/dev has no interface lo.")


def _cpu(tasks: Mapping[str, int]) -> dict[str, float]:
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(entry)
            if fields:
                parents[int(entry.name)] = int(fields[1])
                # utime, stime and those of children that have ended (proc_pid_stat(5)).
                seconds[int(entry.name)] = sum(map(int, fields[11:15])) / _TICKS
    totals = dict.fromkeys(tasks, 0.0)
    owners = {process: name for name, process in tasks.items()}
    for process, used in seconds.items():
        owner = _owner(process, parents, owners)
        if owner is not None:
            totals[owner] += used
    return totals


def _stat(entry: Path) -> list[str]:
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _owner(process: int, parents: Mapping[int, int], owners: Mapping[int, str]) -> str | None:
    while process and process not in owners:
        process = parents.get(process, 0)
    return owners.get(process)
