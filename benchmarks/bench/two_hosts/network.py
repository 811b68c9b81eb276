"""Two hosts out of two network namespaces, joined by a cable of a given rate."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

__all__ = ["ADDRESSES", "DEVICE", "RATES", "lacking", "sent", "two_hosts"]

#: Bits a second of the cable, in each direction, in tc's words.
RATES = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
ADDRESSES = ("10.177.0.1", "10.177.0.2")
DEVICE = "veth0"
_SECONDS = 20.0
#: tbf's bucket, which passes at once, for each rate; and how long a packet may wait.
_BURSTS = {"1gbit": "128kb", "100mbit": "16kb"}
_LATENCY = "100ms"


def lacking() -> str:
    """Why there can be no such network here, in one line; empty if it can be."""
    if os.geteuid() != 0:
        return "needs root: network namespaces and `tc` limit the rate of a cable"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"needs {' and '.join(missing)} (package iproute2)"
    return ""


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[tuple[list[str], list[str]]]:
    """Makes the hosts; yields what comes before a command to run it on each.

    Args:
        rate: a value of `RATES`.
    """
    names = [f"tfdist-bench-{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        first, second = names
        peer = ("peer", "name", DEVICE, "netns", second)
        _run("ip", "link", "add", DEVICE, "netns", first, "type", "veth", *peer)
        for name, address in zip(names, ADDRESSES, strict=True):
            inside = ("ip", "-n", name)
            _run(*inside, "addr", "add", f"{address}/24", "dev", DEVICE)
            _run(*inside, "link", "set", DEVICE, "up")
            _run(*inside, "link", "set", "lo", "up")
            shape = ("rate", rate, "burst", _BURSTS[rate], "latency", _LATENCY)
            _run("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *shape)
        yield tuple(["ip", "netns", "exec", name] for name in names)  # type: ignore[misc]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_SECONDS)


def sent() -> int:
    """Bytes that the host of this process has sent, headers included."""
    with open(f"/sys/class/net/{DEVICE}/statistics/tx_bytes") as file:
        return int(file.read())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
