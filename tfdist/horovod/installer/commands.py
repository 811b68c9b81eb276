"""Runs the commands of a build: their output goes into one log, and nothing outlives this process.

Each command is a session of its own. Ctrl-C, TERM and HUP kill its whole process group, and so does
the death of this process (`tfdist.launcher.guard`).
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tfdist import environment
from tfdist.errors import TfdistError
from tfdist.launcher.process import Guard
from tfdist.launcher.supervisor import Requests, stop_requests

__all__ = ["PIP_HINT", "CommandError", "Commands", "Progress", "StoppedError", "percentages"]

#: Advice for the case that pip cannot download something.
PIP_HINT = (
    "Look at the network and at pip's settings (`pip config list`). Without a network: build on a "
    "machine like this one with --wheel-dir, and install that wheel here with pip."
)

_POLL = 0.1
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
_LINES_KEPT, _LINES_SHOWN, _LINES_AT_ERROR = 5000, 12, 6
_ERROR = re.compile(r"\berror:|\bCMake Error\b", re.IGNORECASE)
#: Lines that TensorFlow prints about itself when it starts.
_NOISE = re.compile(r"^I0000 |^WARNING: All log messages before absl|failed call to cuInit")
#: The end of a trace that only reports that a command failed, which has printed its own reason.
_FAILED_CHILD, _TRACE = "subprocess.CalledProcessError", "Traceback (most recent call last):"
_HINTS = (
    (re.compile(r"No space left on device"), "Make room on the disk; TMPDIR names another one."),
    (
        re.compile(r"Killed signal|\(Killed\)|cannot allocate memory", re.IGNORECASE),
        "The memory was too small: try with CMAKE_BUILD_PARALLEL_LEVEL=1 in the environment.",
    ),
)


class StoppedError(TfdistError):
    """A signal asked for the end."""

    def __init__(self, number: signal.Signals) -> None:
        by = "Ctrl-C" if number == signal.SIGINT else number.name
        super().__init__(f"Stopped by {by}. Nothing was installed.")
        self.exit_status = 128 + number


class CommandError(TfdistError):
    """A command of the build failed, or took too long. The message has its last lines."""

    def __init__(self, what: str, why: str, lines: Sequence[str], log: Path, hint: str) -> None:
        text = "\n".join(lines)
        hint = next((known for sign, known in _HINTS if sign.search(text)), hint)
        shown = "\n".join(f"  {line}" for line in _telling(lines)) or "  (it printed nothing)"
        super().__init__(
            f"{what} failed: {why}. Its last lines:\n{shown}\nThe whole log: {log}\n{hint}".rstrip()
        )


def _telling(lines: Sequence[str]) -> list[str]:
    """The last lines, and before them the first that look like the error itself."""
    lines = [line for line in lines if not _NOISE.search(line)]
    if lines and lines[-1].startswith(_FAILED_CHILD) and _TRACE in lines:
        lines = lines[: len(lines) - 1 - lines[::-1].index(_TRACE)]
    last = max(0, len(lines) - _LINES_SHOWN)
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), last)
    if first >= last:
        return lines[last:]
    after = min(first + _LINES_AT_ERROR, last)
    gap = ["…"] if after < last else []
    return [*lines[first:after], *gap, *lines[last:]]


class Commands(contextlib.ExitStack):
    """Runs one command at a time. A context manager, for the main thread.

    Within it the signals that would end this process are noted and stop the running command.

    Args:
        log: gets the output of all commands; its directory exists.
        temporary: where they put temporary files, so that those go when it goes.
    """

    def __init__(self, log: Path, temporary: Path) -> None:
        super().__init__()
        self.log = log
        self._temporary = temporary

    def __enter__(self) -> Commands:
        with contextlib.ExitStack() as ends:
            self._requests: Requests = ends.enter_context(stop_requests())
            self._guard = ends.enter_context(Guard())
            self._file = ends.enter_context(self.log.open("wb", buffering=0))
            self.push(ends.pop_all())
        return self

    def check_stop(self) -> None:
        """Raises the error that a stop signal calls for, if one was received."""
        if self._requests.received:
            raise StoppedError(self._requests.received[0])

    def run(
        self,
        what: str,
        command: Sequence[str],
        *,
        changes: Mapping[str, str | None] | None = None,
        folder: Path | None = None,
        seconds: float = float("inf"),
        each: Callable[[str], None] = lambda line: None,
        shielded: bool = False,
        hint: str = "",
    ) -> None:
        """Runs a command to its end.

        Args:
            what: its purpose, for messages.
            command: the command.
            changes: to this process's environment; None removes a variable.
            folder: where it runs.
            seconds: how long it may take.
            each: called with each line that it prints.
            shielded: a stop signal waits for its end: it is short and must not be half done.
            hint: what to do if it fails.

        Raises:
            CommandError: if its status is not 0, or it took too long.
            StoppedError: if a signal asked for the end.
        """
        self.check_stop()
        self._file.write(f"$ {shlex.join(command)}\n".encode())
        lines = collections.deque[str](maxlen=_LINES_KEPT)
        process = subprocess.Popen(
            self._guard.command(tuple(command)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment.merged({"TMPDIR": str(self._temporary), **(changes or {})}),
            cwd=folder or self._temporary,
            pass_fds=[self._guard.pipe],
            start_new_session=True,
        )
        try:
            late = self._follow(process, seconds, shielded, lines, each)
        finally:
            _kill(process)
            status = process.wait()
            self._guard.cross_out(process.pid)
        if late or status:
            why = f"it took more than {seconds:g} s" if late else _ending(status)
            raise CommandError(what, why, list(lines), self.log, hint)

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        seconds: float,
        shielded: bool,
        kept: collections.deque[str],
        each: Callable[[str], None],
    ) -> bool:
        """Reads the output of a process until it ends. True if it does not end in time."""
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        part = b""
        with process.stdout as output:
            os.set_blocking(output.fileno(), False)
            while True:
                ended = os.waitid(os.P_PID, process.pid, _ENDED) is not None
                if ended:
                    _kill(process)
                block = output.read() or b""
                self._file.write(block)
                *whole, part = (part + block).split(b"\n")
                for line in [*whole, part] if ended else whole:
                    text = line.decode(errors="replace").rstrip()
                    if text:
                        kept.append(text)
                        each(text)
                if ended:
                    return False
                if not shielded:
                    self.check_stop()
                if time.monotonic() > deadline:
                    return True
                time.sleep(_POLL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that was not waited for yet, so that its number is its own, and its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _ending(status: int) -> str:
    if status < 0:
        return f"it was ended by signal {signal.Signals(-status).name}"
    return f"it ended with status {status}"


#: The prefix of a step's line from make (`[ 45%] Building`) and ninja (`[12/80] Building`).
_STEP = re.compile(r"\[\s*(?:(?P<percent>\d+)%|(?P<done>\d+)/(?P<all>\d+))\]")


class Progress(Protocol):
    """Shows the progress of a build."""

    def phase(self, text: str) -> None:
        """Shows that a new phase begins."""

    def fraction(self, done: float) -> None:
        """Shows the part of the phase that is done, from 0 to 1."""

    def note(self, text: str) -> None:
        """Shows something worth knowing that is not an error."""


def percentages(progress: Progress) -> Callable[[str], None]:
    """A reader of a build tool's lines that reports the part that is done."""

    def read(line: str) -> None:
        step = _STEP.match(line)
        if step and step["percent"]:
            progress.fraction(int(step["percent"]) / 100)
        elif step and int(step["all"]):
            progress.fraction(int(step["done"]) / int(step["all"]))

    return read
