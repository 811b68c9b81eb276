"""Processes forked from a zygote (see `tests.harness.zygote`), and how they are asked for."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from tests.harness.zygote import MESSAGE_BYTES
from tfdist import environment

START_SECONDS = 90.0
#: Where a forked process finds the zygote, to have more processes forked.
VARIABLE = "HARNESS_ZYGOTE"

_ROOT = pathlib.Path(__file__).parents[2]


class Forked:
    """A process that was forked for us; like `subprocess.Popen`, as far as it is needed."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid = pid
        self._handle = handle

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Ends the process at once."""
        self.send_signal(signal.SIGKILL)

    def has_ended(self, seconds: float = 0) -> bool:
        """Whether the process has ended, or does within some seconds."""
        return bool(select.select([self._handle], [], [], seconds)[0])

    def wait(self, seconds: float = 10) -> None:
        """Until the process is gone.

        Raises:
            TimeoutError: if it is not gone in time.
        """
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                signal.pidfd_send_signal(self._handle, 0)
                time.sleep(0.005)
        except ProcessLookupError:
            return
        raise TimeoutError(f"Process {self.pid} has not ended within {seconds:g} s.")


def fork(
    name: str, entry: str, *arguments: Any, environ: dict[str, str], files: list[int]
) -> Forked:
    """Has a process forked by a zygote.

    Args:
        name: the zygote's socket.
        entry: `module:function` that the process runs.
        *arguments: picklable arguments, after the numbers of the files.
        environ: the process's environment.
        files: standard input, standard output and error, and files whose numbers `entry` gets.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(START_SECONDS)
        connection.connect("\0" + name)
        message = pickle.dumps((environ, entry, list(arguments)))
        assert len(message) < MESSAGE_BYTES
        socket.send_fds(connection, [message], files)
        answer, handles, _, _ = socket.recv_fds(connection, 64, 1)
    return Forked(int(answer), handles[0])


class Zygote:
    """A zygote of this process; it starts with the first fork.

    Args:
        log: its log file.
    """

    def __init__(self, log: pathlib.Path) -> None:
        self._name = f"zygote-{os.getpid()}-{id(self)}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def fork(
        self, entry: str, *arguments: Any, environ: dict[str, str], files: list[int]
    ) -> Forked:
        """See `fork`."""
        with self._lock:
            self._start(environ)
        return fork(
            self._name,
            entry,
            *arguments,
            environ=environment.merged({VARIABLE: self._name}, environ),
            files=files,
        )

    def close(self) -> None:
        """Ends the zygote, and with it all that it has forked."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def process_ids(self) -> set[int]:
        """The zygote's id, if it runs."""
        return set() if self._process is None else {self._process.pid}

    def _start(self, environ: dict[str, str]) -> None:
        if self._process is not None:
            return
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.zygote", self._name],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
                env=environ,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._listens():
            late = time.monotonic() > deadline
            if late or self._process.poll() is not None:
                raise RuntimeError(f"The zygote did not start: {self._log.read_text()}")
            time.sleep(0.05)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            return connection.connect_ex("\0" + self._name) == 0
