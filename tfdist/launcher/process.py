"""Starts the tasks of a plan, each in its own process group, and ends them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from types import TracebackType

from tfdist import environment
from tfdist.errors import TfdistError
from tfdist.launcher import guard
from tfdist.launcher.output import Pump, TaskOutput
from tfdist.launcher.plan import TaskPlan
from tfdist.launcher.ssh import BEAT_SECONDS

__all__ = ["Guard", "RunningTask", "Terminal", "spawn"]

#: The exit status of ssh if it failed itself.
_SSH_FAILED = 255

_PYTHON = (sys.executable, "-I", "-S")
_GUARD = (*_PYTHON, guard.__file__)
#: Forks and ends the parent, so that the command has no parent that could be asked to end it.
_DETACHED = (
    *(*_PYTHON, "-c"),
    "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])",
)


@dataclasses.dataclass(frozen=True)
class Terminal:
    """The destination of the shown task's output: the launcher's own output.

    Attributes:
        stdout: a descriptor; a terminal makes the task's output a pseudo-terminal.
        stderr: likewise.
        stdin: the task's input, or None for nothing.
    """

    stdout: int = 1
    stderr: int = 2
    stdin: int | None = None


class Guard:
    """Sees to it that started tasks end with this process, however it ends.

    A context manager. See `tfdist.launcher.guard` for how.

    Args:
        detached: whether whoever ends all children of this process must not find the watcher.
    """

    def __init__(self, *, detached: bool = False) -> None:
        self._detached = detached

    def __enter__(self) -> Guard:
        out, self.pipe = os.pipe()
        self._watcher = subprocess.Popen(
            [*(_DETACHED if self._detached else ()), *_GUARD, "watch", str(out)],
            pass_fds=[out],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(out)
        if self._detached:
            self._watcher.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.pipe)
        self._watcher.wait()

    def command(self, command: tuple[str, ...]) -> list[str]:
        """The command that writes itself down and then becomes `command`."""
        return [*_GUARD, "exec", str(self.pipe), *command]

    def cross_out(self, group: int) -> None:
        """Forgets a group that has ended, before its number can be used again."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, f"-{group}\n".encode())


@dataclasses.dataclass
class RunningTask:
    """A started task.

    Attributes:
        plan: the plan of the task.
        output: its log and last lines.
        returncode: as in `subprocess`: negative for a signal; None while it runs.
        peak_rss: its largest resident memory in bytes, once it has ended on this machine.
        paused: whether it was stopped by SIGSTOP or a debugger when the job was to end.
    """

    plan: TaskPlan
    output: TaskOutput
    _process: subprocess.Popen[bytes]
    _guard: Guard
    _window: tuple[int, int] | None = None
    returncode: int | None = None
    peak_rss: int | None = None
    paused: bool = False
    _last_beat: float = 0.0

    def poll(self) -> int | None:
        """The task's return code, or None while it runs.

        Call it often: a task on another machine lives as long as it hears of its launcher.

        When the task has ended, processes that it left in its group are killed. The group's number
        is still taken at that moment, so nobody else can be hit.
        """
        if self.returncode is None:
            state = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is None:
                self._beat()
            else:
                self.signal(signal.SIGKILL)
                self.returncode = self._wait()
                self._guard.cross_out(self._process.pid)
                if self.plan.host is not None and 128 < self.returncode < _SSH_FAILED:
                    self.returncode = 128 - self.returncode  # A signal ended it there.
        return self.returncode

    def note_pause(self) -> None:
        """Notes whether the task is stopped by a signal, before others are sent to it."""
        if self.returncode is None:
            # Without WEXITED, waitid fails if the task has ended since the last look.
            flags = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
            state = os.waitid(os.P_PID, self._process.pid, flags)
            self.paused = state is not None and state.si_code == os.CLD_STOPPED

    def _wait(self) -> int:
        """Waits for the task, which has ended, with a look at its memory."""
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        if self.plan.host is None:
            self.peak_rss = usage.ru_maxrss * 1024
        return self._process.returncode

    def _beat(self) -> None:
        """Sends a task on another machine a sign that the launcher lives."""
        now = time.monotonic()
        if self._process.stdin is not None and now - self._last_beat > BEAT_SECONDS:
            self._last_beat = now
            with contextlib.suppress(OSError, ValueError):
                os.write(self._process.stdin.fileno(), b".")

    def resize(self) -> None:
        """Gives the task's pseudo-terminal the present size of the launcher's terminal."""
        if self._window is not None:
            _copy_size(*self._window)

    def close(self) -> None:
        """Closes the log of a task that has ended and been read."""
        self.output.close()
        self._hang_up()
        if self._window is not None:
            os.close(self._window[1])
            self._window = None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the task and its children, unless it has been waited for.

        A task on another machine is ended there when its line is cut.
        """
        if self._process.stdin is not None and number != signal.SIGKILL:
            self._hang_up()
        elif self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _hang_up(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def spawn(
    plan: TaskPlan,
    *,
    guard: Guard,
    pump: Pump,
    terminal: Terminal | None,
    complain: Callable[[str], None],
    again: str = "",
) -> RunningTask:
    """Starts one task in a session of its own.

    Args:
        plan: what to start.
        guard: ends the task if this process dies.
        pump: reads the task's output.
        terminal: also shows the output; None for the log file only.
        complain: called once if the log cannot be written.
        again: if a task is started again, the line that its log is continued with.

    Raises:
        TfdistError: if the operating system refuses to start a process.
    """
    output = TaskOutput(plan.log, complain, append=bool(again))
    if again:
        output.write([again.encode()])
    with contextlib.ExitStack() as ends_of_task:
        streams = _streams(terminal)
        for _, inner, _ in streams:
            ends_of_task.callback(os.close, inner)
        try:
            process = _start(plan, guard, _stdin(terminal), streams[0][1], streams[-1][1])
        except OSError as error:
            for ours, _, _ in streams:
                os.close(ours)
            raise TfdistError(f"Cannot start {plan.task}: {error.strerror}.") from error
    window = None
    for ours, _, echo in streams:
        if echo is not None and window is None and os.isatty(ours):
            window = (echo, os.dup(ours))
        pump.add(ours, output, echo)
    return RunningTask(plan, output, process, guard, window)


def _start(
    plan: TaskPlan, guard: Guard, stdin: int, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Starts the process of a task, and gives it its order if it has one."""
    process = subprocess.Popen(
        guard.command(plan.command),
        stdin=stdin if plan.order is None else subprocess.PIPE,
        bufsize=0,
        stdout=stdout,
        stderr=stderr,
        env=environment.merged(plan.environ),
        pass_fds=[guard.pipe],
        start_new_session=True,
    )
    if plan.order is not None and process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # It has ended, and reports why.
            process.stdin.write(plan.order())
            os.set_blocking(process.stdin.fileno(), False)
    return process


def _stdin(terminal: Terminal | None) -> int:
    if terminal is None or terminal.stdin is None:
        return subprocess.DEVNULL
    return terminal.stdin


def _streams(terminal: Terminal | None) -> list[tuple[int, int, int | None]]:
    """Opens the task's output: for each stream our end, the task's end, and the echo.

    One stream for both if both go to the same place, so that their order is kept.
    """
    if terminal is None:
        return [(*os.pipe(), None)]
    if os.isatty(terminal.stdout) and os.isatty(terminal.stderr):
        return [(*_open_terminal(terminal.stdout), terminal.stdout)]
    return [
        (*(_open_terminal(fd) if os.isatty(fd) else os.pipe()), fd)
        for fd in (terminal.stdout, terminal.stderr)
    ]


def _open_terminal(like: int) -> tuple[int, int]:
    """A pseudo-terminal of the size of another terminal, which leaves line ends alone."""
    ours, tasks = pty.openpty()
    attributes = termios.tcgetattr(tasks)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(tasks, termios.TCSANOW, attributes)
    _copy_size(like, tasks)
    return ours, tasks


def _copy_size(source: int, target: int) -> None:
    """Gives one terminal the size of another."""
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)
