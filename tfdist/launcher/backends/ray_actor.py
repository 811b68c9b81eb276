"""The actor that starts one task as a process on a node of Ray, and looks after it.

Ray kills an actor whose driver is gone, and with it the processes that the actor itself has
started, but not theirs. So the task's process group is written down with a watcher
(`tfdist.launcher.guard`) that is nobody's child and outlives the actor.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfdist import environment
from tfdist.cluster import resources
from tfdist.cluster.ports import HeldPorts
from tfdist.errors import ConfigError
from tfdist.launcher import ssh
from tfdist.launcher.process import Guard

__all__ = ["Runner", "check", "library"]


# The one place that imports Ray, which is large and optional.


def check() -> None:
    """Looks for Ray without importing it.

    Raises:
        ConfigError: if it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--on ray needs Ray, which is not installed here. Run `pip install 'tfdist[ray]'`, on "
            "the nodes too, or leave --on out."
        )


def library(module: str = "ray") -> Any:
    """Ray, or a module of it.

    Args:
        module: such as `"ray.exceptions"`.
    """
    return importlib.import_module(module)


_BLOCK = 1 << 16
_POLL = 0.05
#: Seconds in which output still comes that children of an ended task have open.
_LINGER = 0.5
#: Seconds for the kernel to take down what was killed.
_AFTER_KILL = 3.0

#: Workers of Ray block SIGINT, and one that was started in the background of a shell ignores it; a
#: task must get it. Undoes both, and becomes the command.
_PLAIN = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_SETMASK, []); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Runner:
    """Starts one task on this node. Ray calls its methods, several at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._returncode: int | None = None
        self._selector = selectors.DefaultSelector()
        self._held: HeldPorts | None = None
        self._guard = Guard(detached=True)

    def ready(self) -> bool:
        """Answers as soon as the actor is there."""
        return True

    def inspect(self, folder: str) -> dict[str, Any]:
        """The facts of this node for the launcher: a free port, versions, the clock, GPUs.

        Args:
            folder: the directory in which the task is to run.
        """
        self._held = HeldPorts(1)
        return {
            "host": library().util.get_node_ip_address(),
            "port": self._held.ports[0],
            "python": sys.executable,
            "gpus": resources.visible(environment.snapshot()),
            "folder": os.path.isdir(folder),
            "facts": ssh.host_facts(1),
        }

    def start(
        self, command: list[str], environ: Mapping[str, str | None], folder: str, streams: int
    ) -> str | None:
        """Starts the task.

        Args:
            command: the program and its arguments.
            environ: changes to the environment that Ray gives the actor.
            folder: the directory in which it runs.
            streams: 2 to keep its errors apart from its output, else 1.

        Returns:
            Why it cannot be started, or None.
        """
        self._guard.__enter__()  # It is left by the end of this process.
        pipes = [os.pipe() for _ in range(streams)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PLAIN, *self._guard.command(tuple(command))],
                stdin=subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[-1][1],
                env=environment.merged(environ),
                cwd=folder,
                pass_fds=[self._guard.pipe],
                start_new_session=True,
            )
        except OSError as error:
            return f"cannot start {command[0]!r} in {folder!r}: {error.strerror}"
        finally:
            for _, inner in pipes:
                os.close(inner)
        for number, (ours, _) in enumerate(pipes, 1):
            self._selector.register(ours, selectors.EVENT_READ, number)
        return None

    def poll(self, seconds: float) -> tuple[list[tuple[int, bytes]], int | None]:
        """The output of the task since the last call; waits for it if there is nothing.

        Args:
            seconds: how long to wait.

        Returns:
            Blocks of output, each with the number of its stream, and the task's return code as in
            `subprocess` once it has ended and all has been read.
        """
        over = self._ended_within(0)
        if not self._selector.get_map():
            return [], self._returncode if self._ended_within(seconds) else None
        blocks = []
        for key, _ in self._selector.select(_LINGER if over else seconds):
            data = os.read(key.fd, _BLOCK)
            if data:
                blocks.append((key.data, data))
            else:
                self._selector.unregister(key.fd)
                os.close(key.fd)
        return blocks, self._returncode if over and not blocks else None

    def signal(self, number: int) -> None:
        """Sends a signal to the task and its children, unless it has ended."""
        with self._lock:
            if self._process is not None and self._returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)

    def end(self, grace: float) -> None:
        """Ends the task if it still runs: politely, then by force.

        Args:
            grace: seconds between TERM and KILL.
        """
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        if not self._ended_within(grace):
            self.signal(signal.SIGKILL)
            self._ended_within(_AFTER_KILL)

    def _ended_within(self, seconds: float) -> bool:
        """Whether the task ends before so many seconds have passed."""
        deadline = time.monotonic() + seconds
        while not self._reap():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        return True

    def _reap(self) -> bool:
        """Whether the task has ended; what is left of its group then ends too."""
        with self._lock:
            process = self._process
            if process is None or self._returncode is not None:
                return True
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, process.pid, options) is None:
                return False
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # Nobody else has its number yet.
            self._returncode = process.wait()
            self._guard.cross_out(process.pid)
            return True
