"""One `srun` within an allocation, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence

from tfdist.cluster.engines.slurm_commands import Echo, call
from tfdist.cluster.launch.attempt import Requests
from tfdist.cluster.launch.blame import exit_status
from tfdist.errors import StartError

__all__ = ["run"]

_BLOCK = 1 << 16
_POLL = 0.2
#: Seconds that tasks have after a signal before Slurm ends them: each ends its script by itself.
_TO_END = 5.0
#: Seconds that `srun` has to end them: it waits for Slurm's KillWait, 30 s by default.
_TO_FORCE = 40.0


def run(words: Sequence[str], name: str, job: str, requests: Requests) -> tuple[int, list[str]]:
    """Starts `srun` and stays until its end.

    The first signal that asks to stop goes to all tasks; what has not ended soon is ended by Slurm.

    Args:
        words: the command.
        name: the step's name in that job, which no other step has.
        job: the job's number.
        requests: the signals that ask to stop.

    Returns:
        The exit status, and what Slurm said on standard error.

    Raises:
        StartError: if Slurm does not end the tasks in time.
    """
    echo = Echo(2)
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stderr is not None, "a pipe was asked for"
    stop = _Stop(process, name, job)
    with process.stderr as stream:
        try:
            while _passed_on(stream.fileno(), echo) or process.poll() is None:
                if requests.received:
                    stop.go_on(requests)
        finally:
            process.kill()  # Does nothing to one that has ended.
            process.wait()
    return exit_status(process.returncode), echo.lines


def _passed_on(stream: int, echo: Echo) -> bool:
    """Passes on what comes within a moment; whether more may come."""
    if not select.select([stream], [], [], _POLL)[0]:
        return True
    data = os.read(stream, _BLOCK)
    echo.feed(data)
    if not data:
        time.sleep(_POLL)  # It is about to end.
    return bool(data)


class _Stop:
    """Ends a step politely, then by force. `srun` itself, on TERM, kills the tasks at once."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, job: str) -> None:
        self._process = process
        self._name = name
        self._job = job
        self._stage = 0
        self._deadline = 0.0

    def go_on(self, requests: Requests) -> None:
        """Does what is next, if it is time for it."""
        now = time.monotonic()
        if self._stage == 0:
            self._stage, self._deadline = 1, now + _TO_END
            if not self._signal_tasks(requests.received[0]):
                self._deadline = now
        elif self._stage == 1 and (now >= self._deadline or len(requests.received) > 1):
            self._stage, self._deadline = 2, now + _TO_FORCE
            self._process.terminate()
        elif self._stage == 2 and now >= self._deadline:
            raise StartError(
                f"Slurm has not ended the step {self._name} of job {self._job} within "
                f"{_TO_FORCE:.0f} s. Cancel the job: scancel {self._job}"
            )

    def _signal_tasks(self, number: signal.Signals) -> bool:
        """Sends a signal to all tasks; whether that was possible."""
        sent = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        asked = ("--steps", f"--jobs={self._job}", "--noheader", "--format=%i|%j")
        with contextlib.suppress(StartError):
            steps = [line.strip().partition("|") for line in call("squeue", *asked).splitlines()]
            own = [step for step, _, name in steps if name == self._name]
            if own:
                call("scancel", f"--signal={sent.name.removeprefix('SIG')}", *own)
            return bool(own)
        return False
