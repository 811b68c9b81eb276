"""Joins in a child process, while this one imports TensorFlow.

A thread would not do. Python runs nothing else while a shared library is loaded, which takes
TensorFlow's seconds from a cold disk, and a task that does not answer for seconds counts as
unreachable. The child is forked before TensorFlow is imported, when the process has one thread.

The child writes to a socket: a byte with each batch of connections that stay open, then what it
found as JSON, then the socket's end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from tfdist.cluster.rendezvous.transport import JoinReport
from tfdist.errors import StartError

__all__ = ["in_background"]

#: Connections in a message: Linux allows 253 (SCM_MAX_FD).
_BATCH = 200
_LONGEST = 1 << 16


@contextlib.contextmanager
def in_background(join: Callable[[], JoinReport]) -> Iterator[Callable[[], JoinReport]]:
    """A block during which a child process joins.

    The block should call what it is given before its end: it waits for the report and raises
    `StartError` as `join` would. A child that still waits ends with the block, or with this
    process, and leaves this task's port.

    Args:
        join: joins; runs in the child.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        _join_and_leave(join, theirs)
    theirs.close()
    try:
        with ours:
            yield lambda: _received(ours)
    finally:
        os.waitpid(child, 0)


def _join_and_leave(join: Callable[[], JoinReport], parent: socket.socket) -> NoReturn:
    """Runs in the child, which must never return to the parent's code."""
    try:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        try:
            report = join()
        except StartError as error:
            _send(parent, {"error": str(error)}, ())
        else:
            outcome = {"seconds": report.seconds, "offer": dict(report.offer), "late": report.late}
            _send(parent, outcome, report.lines)
    except KeyboardInterrupt:  # The parent has it too, and reports it.
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _end_with(parent: socket.socket) -> None:
    """Ends this process when its parent has ended, however that happened."""
    with contextlib.suppress(OSError):
        parent.recv(1)
    os._exit(0)


def _send(parent: socket.socket, outcome: dict[str, Any], lines: Sequence[socket.socket]) -> None:
    numbers = [line.fileno() for line in lines]
    for begin in range(0, len(numbers), _BATCH):
        socket.send_fds(parent, [b"."], numbers[begin : begin + _BATCH])
    parent.sendall(json.dumps(outcome).encode())


def _received(child: socket.socket) -> JoinReport:
    """Waits for the child's report; its own deadlines end the wait."""
    text, numbers = b"", []
    while True:
        data, some, _, _ = socket.recv_fds(child, _LONGEST, _BATCH)
        numbers += some
        if not data:
            break
        text += data
    lines = tuple(socket.socket(fileno=number) for number in numbers)
    try:
        outcome = json.loads(text.lstrip(b"."))
    except ValueError:
        raise StartError(
            "The process that met the other tasks for this one has ended without a word. If no "
            "error is above, it was killed: see `dmesg`."
        ) from None
    if "error" in outcome:
        raise StartError(outcome["error"])
    return JoinReport(outcome["seconds"], outcome["offer"], lines, outcome["late"])
