"""A network and a process tree of its own for each cluster, where the system allows it.

In a network namespace the counters of `lo` count the cluster's bytes and nobody else's. In a
process namespace the end of its first process is the end of them all, so nothing can be left over.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import shutil
import socket
import struct
import subprocess

__all__ = ["Isolation", "bring_loopback_up", "isolation"]

_PROBE_SECONDS = 10.0
_NAMESPACES = ("--net", "--pid", "--fork", "--kill-child", "--mount-proc")
#: ioctls and a flag of netdevice(7).
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


@dataclasses.dataclass(frozen=True)
class Isolation:
    """How a cluster is kept apart.

    Attributes:
        prefix: what comes before its command.
        reason: why there is none; empty where there is one.
    """

    prefix: tuple[str, ...]
    reason: str

    @property
    def own_network(self) -> bool:
        """Whether the cluster has `lo` for itself."""
        return bool(self.prefix)


@functools.cache
def isolation() -> Isolation:
    """Finds out, by trying, how this user may isolate a cluster."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return Isolation((), "there is no command unshare (package util-linux)")
    for rights in ((), ("--map-root-user",)):
        prefix = (unshare, *rights, *_NAMESPACES, "--")
        done = subprocess.run(
            (*prefix, "true"), capture_output=True, check=False, timeout=_PROBE_SECONDS
        )
        if done.returncode == 0:
            return Isolation(prefix, "")
    return Isolation((), "a network namespace needs root or user namespaces (unshare --net failed)")


def bring_loopback_up() -> None:
    """Brings `lo` up; a new network namespace starts with it down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | _IFF_UP, b""))
