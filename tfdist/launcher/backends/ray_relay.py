"""The local process of a task that runs in an actor of Ray: it passes output and signals on.

    python -I -S ray_relay.py DOOR NUMBER

It connects to the driver's socket DOOR, names the task it stands for, writes what the task prints,
sends the signals that it gets itself, and ends as the task does. To the launcher it is the task.

A file of its own that imports nothing of tfdist, and nothing of Ray: it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from types import FrameType

__all__ = ["END", "HEADER", "frame", "relay"]

#: The head of a message from the driver: a kind and a length; so many bytes follow. Kinds 1 and
#: 2 are output for that descriptor; END has the exit status as its text.
HEADER = struct.Struct("!BI")
END = 0

#: The exit status if the driver has gone without a word.
_LOST = 1


def frame(kind: int, data: bytes) -> bytes:
    """One message of the driver."""
    return HEADER.pack(kind, len(data)) + data


def relay(door: socket.socket) -> int:
    """Passes output and signals on until the task has ended.

    Returns:
        The task's exit status, or 128 + n if signal n ended it.
    """

    def send(number: int, _: FrameType | None) -> None:
        try:
            door.send(bytes([number]))
        except OSError:
            sys.exit(_LOST)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, send)
    with door.makefile("rb") as stream:
        while header := stream.read(HEADER.size):
            if len(header) < HEADER.size:
                break
            kind, length = HEADER.unpack(header)
            data = stream.read(length)
            if kind == END:
                status = int(data)
                return status if status >= 0 else 128 - status
            _write(kind, data)
    print("tfdist: the process that talks to Ray has ended.", file=sys.stderr)
    return _LOST


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _main(path: str, number: str) -> int:
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(path)
        door.sendall(f"{number}\n".encode())
        return relay(door)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
