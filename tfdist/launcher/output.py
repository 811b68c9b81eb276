"""The output of tasks: to log files and to the terminal, with the last lines kept in memory.

The launcher reads all output itself. A log file on a full disk then costs the log, not the
training: the reading goes on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import select
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

__all__ = ["Pump", "TaskOutput", "write_all"]

_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
_LONGEST_PART = 1 << 16
_BLOCK = 1 << 16
#: So many that the stacks of all threads, which Python prints at a crash, leave what came before.
_LINES_KEPT = 1000


class _Lines:
    """Cuts a stream into finished lines and leaves out what was overwritten.

    A progress bar redraws its line hundreds of times by carriage returns. The log gets the last
    state of each line.
    """

    def __init__(self) -> None:
        self._part = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._part = (self._part + data).split(b"\n")
        if len(self._part) > _LONGEST_PART:
            # Only what comes after the last carriage return can still be seen.
            kept = self._part.rpartition(b"\r")[2]
            self._part = b"" if len(kept) > _LONGEST_PART else b"\r" + kept
            if len(kept) > _LONGEST_PART:
                lines.append(kept)
        return [_shown(line) for line in lines]

    def finish(self) -> list[bytes]:
        part, self._part = _shown(self._part), b""
        return [part] if part else []


def _shown(line: bytes) -> bytes:
    """The text that a line with carriage returns and colours leaves on the screen."""
    states = [state for state in re.split(rb"[\r\b]+", line) if state.strip()]
    return _CONTROL.sub(b"", states[-1]) if states else b""


@dataclasses.dataclass
class TaskOutput:
    """The destinations of one task's output.

    Attributes:
        log: the log file.
        complain: called once, when the log file cannot be written.
        append: whether the file's content is kept: a task that is started again.
    """

    log: Path
    complain: Callable[[str], None]
    append: bool = False
    _file: BinaryIO | None = None
    _tail: collections.deque[str] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_LINES_KEPT)
    )

    def __post_init__(self) -> None:
        try:
            # Always at the end: late output of a task that died follows what its successor wrote.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if self.append else os.O_TRUNC)
            self._file = open(os.open(self.log, flags, 0o666), "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            self._give_up(error)

    @property
    def logged(self) -> bool:
        """Whether the log file is complete so far."""
        return self._file is not None

    def tail(self) -> list[str]:
        """The last lines, as many as are kept."""
        return list(self._tail)

    def write(self, lines: list[bytes]) -> None:
        """Adds finished lines."""
        if not lines:
            return
        self._tail.extend(line.decode(errors="replace") for line in lines)
        if self._file is None:
            return
        try:
            write_all(self._file.fileno(), b"\n".join(lines) + b"\n")
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Closes the log file."""
        if self._file is not None:
            self._file.close()

    def _give_up(self, error: OSError) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None
        self.complain(
            f"Cannot write the log {str(self.log)!r}: {error.strerror}. The job goes on without "
            "it. Free some space, or choose another directory with --log-dir."
        )


@dataclasses.dataclass
class _Source:
    """One stream of a task, and the terminal or file that also shows it."""

    fd: int
    output: TaskOutput
    echo: int | None
    lines: _Lines = dataclasses.field(default_factory=_Lines)


class Pump:
    """Reads the output of all tasks in one thread.

    Attributes:
        midline: whether the last output left the terminal's cursor within a line.

    Args:
        aside: entered with each piece of output that is shown, while it is written.
    """

    def __init__(
        self, aside: Callable[[bytes], AbstractContextManager[object]] = contextlib.nullcontext
    ) -> None:
        self.midline = False
        self._aside = aside
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._wake_out, self._wake_in = os.pipe()
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tfdist output", daemon=True)
        self._thread.start()

    def add(self, fd: int, output: TaskOutput, echo: int | None = None) -> None:
        """Reads `fd` from now on until its end, and closes it then.

        Args:
            fd: the readable end of a pipe or a pseudo-terminal.
            output: where the lines go.
            echo: a descriptor that gets every byte unchanged.
        """
        with self._lock:
            self._selector.register(fd, selectors.EVENT_READ, _Source(fd, output, echo))
        self._wake()

    def close(self, timeout: float = 1.0) -> None:
        """Reads the output that is still on its way and stops.

        Args:
            timeout: seconds to wait for streams that some stray process keeps open.
        """
        deadline = time.monotonic() + timeout
        while self._sources() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopping = True
        self._wake()
        self._thread.join(timeout)
        if self._thread.is_alive():
            return  # It writes to a terminal that is stopped. The thread ends with the process.
        for source in self._sources():
            self._finish(source)
        self._selector.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _wake(self) -> None:
        os.write(self._wake_in, b".")

    def _sources(self) -> list[_Source]:
        with self._lock:
            keys = list(self._selector.get_map().values())
        return [key.data for key in keys if key.data is not None]

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(timeout=1.0):
                if key.data is None:
                    os.read(self._wake_out, _BLOCK)
                else:
                    self._read(key.data)

    def _read(self, source: _Source) -> None:
        try:
            data = os.read(source.fd, _BLOCK)
        except OSError:
            data = b""  # A pseudo-terminal ends with an error: its last user closed it.
        if not data:
            self._finish(source)
            return
        if source.echo is not None:
            try:
                with self._aside(data):
                    write_all(source.echo, data)
                self.midline = not data.endswith(b"\n")
            except OSError:
                source.echo = None  # The reader of the launcher's output has gone away.
        source.output.write(source.lines.feed(data))

    def _finish(self, source: _Source) -> None:
        source.output.write(source.lines.finish())
        with self._lock:
            self._selector.unregister(source.fd)
        os.close(source.fd)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of the data to a file descriptor, in as many parts as it takes.

    Raises:
        OSError: as `os.write` does, such as when the reader of a pipe is gone.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [], 1.0)
