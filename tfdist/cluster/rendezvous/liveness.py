"""Detects in a server that its chief has ended, and whether that was in order.

TensorFlow's servers run for ever, and gRPC does not notify them when their chief has gone. So the
connection over which a server has joined stays open while the chief lives. The system closes it
when the chief's process ends, however it ends; keep-alive packets find out when its machine has
gone. Before it ends in order, the chief sends its exit status over the line.

A server that was started in the place of another has no such line. It looks whether the chief's
port is open.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import socket
import sys
import time
from collections.abc import Iterable

from tfdist.cluster.rendezvous.transport import encode
from tfdist.cluster.spec import Address

__all__ = ["End", "await_end", "await_silence", "hold", "send_farewell"]

#: Seconds of silence after which the chief counts as gone, and between two looks at it.
_SECONDS_TO_BE_GONE = 10.0
_PROBE_EVERY = 2.0
#: Seconds for a chief that has sent its farewell to end.
_SECONDS_TO_LEAVE = 5.0
_LONGEST_MESSAGE = 1 << 16

#: Times of the system's keep-alive packets, in seconds: 4 + 3 * 2 until the line counts as dead.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}

_held: list[socket.socket] = []


@dataclasses.dataclass(frozen=True)
class End:
    """The end of the chief, as far as a server can see it.

    Attributes:
        status: the chief's exit status, or None if it went without a word.
        seen: a description of its end.
    """

    status: int | None
    seen: str


def hold(lines: Iterable[socket.socket]) -> None:
    """Keeps the lines of the chief open as long as its process lives.

    If the program does not call `send_farewell`, that is done at its exit.
    """
    if not _held:
        atexit.register(_send_farewell_at_exit)
    _held.extend(lines)


def send_farewell(status: int) -> None:
    """Sends the chief's exit status to all servers.

    The lines stay open until the process has ended: TensorFlow still talks to the servers then.

    Args:
        status: the chief's exit status.
    """
    while _held:
        line = _held.pop()
        with contextlib.suppress(OSError):
            line.settimeout(_PROBE_EVERY)
            line.sendall(encode(kind="farewell", status=status))
        line.detach()


def await_end(line: socket.socket) -> End:
    """Waits until the chief at the other end of a line has ended.

    It has no deadline of its own: a server lives as long as its chief.
    """
    _keep_alive(line)
    line.settimeout(None)
    data = b""
    try:
        while b"\n" not in data and len(data) < _LONGEST_MESSAGE:
            received = line.recv(4096)
            if not received:
                return End(None, "its connection was closed")
            data += received
        end = _read(data)
        line.settimeout(_SECONDS_TO_LEAVE)
        with contextlib.suppress(TimeoutError):
            while line.recv(4096):
                pass
    except OSError as error:
        if b"\n" not in data:
            return End(None, f"its connection broke ({error.strerror or error})".lower())
        end = _read(data)
    return end


def await_silence(
    address: Address, every: float = _PROBE_EVERY, gone: float = _SECONDS_TO_BE_GONE
) -> End:
    """Waits until nobody has listened at the chief's address for some seconds.

    It has no deadline of its own: a server lives as long as its chief.

    Args:
        address: the chief's.
        every: seconds between two looks.
        gone: seconds without an answer after which the chief counts as gone.
    """
    seen = time.monotonic()
    while True:
        problem = _probe(address, every)
        if problem is None:
            seen = time.monotonic()
        elif time.monotonic() - seen >= gone:
            return End(None, f"{problem} for {gone:g} s")
        time.sleep(every)


def _send_farewell_at_exit() -> None:
    send_farewell(0 if getattr(sys, "last_value", None) is None else 1)


def _keep_alive(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            option = getattr(socket, name, None)  # Not every system has all.
            if option is not None:
                line.setsockopt(socket.IPPROTO_TCP, option, value)


def _read(data: bytes) -> End:
    try:
        status = int(json.loads(data.partition(b"\n")[0])["status"])
    except (ValueError, KeyError, TypeError):
        return End(None, "it said something that is not a farewell")
    return End(status, f"it ended with exit status {status}")


def _probe(address: Address, timeout: float) -> str | None:
    """The reason why the chief cannot be reached, or None if it can."""
    try:
        socket.create_connection((address.host, address.port), timeout).close()
    except ConnectionRefusedError:
        return "connection refused"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None
