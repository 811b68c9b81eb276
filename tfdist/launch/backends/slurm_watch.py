"""A batch job of Slurm, from `sbatch` to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdist.errors import StartError
from tfdist.launch.backends.slurm import ENDED, Echo, JobState, call, job_state, output_files
from tfdist.launch.root_cause import exit_status
from tfdist.launch.supervisor import Requests

__all__ = ["run", "submit", "watch"]

_BLOCK = 1 << 16
#: Seconds between two looks at the files.
_LOOK_EVERY = 0.2
#: Seconds between two questions to Slurm: at first, and at most. They grow with the job's age.
_ASK_FIRST, _ASK_AT_MOST = 0.5, 10.0
#: Seconds in which questions may fail, as while Slurm's controller is started again.
_PATIENCE = 300.0
#: Seconds in which a job waits before the user is notified, and seconds until the next notice.
_WAITS_QUIETLY, _TELLS_AGAIN = 5.0, 300.0
#: Seconds for a cancelled job to end: its tasks get Slurm's KillWait, 30 s by default.
_TO_CANCEL = 90.0
#: Seconds for the last lines to come over a file system of several machines.
_TO_SETTLE = 1.0
_SECONDS_TO_SUBMIT = 120.0


def submit(script: Path) -> str:
    """Submits a batch script; the job's number.

    Raises:
        StartError: if Slurm does not take it, with its own words.
    """
    told = call("sbatch", "--parsable", str(script), seconds=_SECONDS_TO_SUBMIT)
    return told.strip().splitlines()[-1].partition(";")[0]


def watch(
    job: str, log_dir: Path, requests: Requests, note: Callable[[str, bool], None]
) -> tuple[JobState, list[str]]:
    """Shows a job's output until it has ended. A signal that asks to stop cancels it.

    Args:
        job: its number.
        log_dir: where its output files are.
        requests: the signals that ask to stop.
        note: notifies the user of something, and whether to begin a new line for it.

    Returns:
        How it has ended, and what Slurm wrote to standard error.

    Raises:
        StartError: if Slurm is not heard of any more, or a cancelled job does not end.
    """
    out, error = (_Tail(path, Echo(n)) for n, path in enumerate(output_files(log_dir, job), 1))
    asking, waiting, cancelling = _Asking(job), _Waiting(job, note), _Cancelling(job)
    while True:
        ended = asking.state.name in ENDED
        if ended:
            time.sleep(_TO_SETTLE)
        out.copy()
        error.copy()
        if ended:
            return asking.state, error.echo.lines
        if requests.received:
            cancelling.go_on(requests)
        if asking.ask(hurry=bool(requests.received)):
            waiting.tell(asking.state, out.echo.midline or error.echo.midline)
        time.sleep(_LOOK_EVERY)


class _Tail:
    """A file that grows, and may not be there yet."""

    def __init__(self, path: Path, echo: Echo) -> None:
        self.echo = echo
        self._path = path
        self._read = 0

    def copy(self) -> None:
        """Shows the new lines."""
        with contextlib.suppress(OSError), self._path.open("rb") as stream:
            stream.seek(self._read)
            while data := stream.read(_BLOCK):
                self._read += len(data)
                self.echo.feed(data)


class _Asking:
    """The state of a job, asked of Slurm seldom enough for many jobs at once."""

    def __init__(self, job: str) -> None:
        self.state = JobState("PENDING")
        self._job = job
        self._begun = self._heard = time.monotonic()
        self._asked = 0.0

    def ask(self, hurry: bool) -> bool:
        """Asks if it is time to; whether there is an answer."""
        now = time.monotonic()
        pause = min(_ASK_AT_MOST, max(_ASK_FIRST, (now - self._begun) / 10))
        if now - self._asked < (_ASK_FIRST if hurry else pause):
            return False
        self._asked = now
        try:
            state = self._answer()
        except StartError as error:
            if time.monotonic() - self._heard > _PATIENCE:
                raise StartError(
                    f"Slurm has told nothing of job {self._job} for {_PATIENCE:.0f} s: {error} "
                    f"The job may go on. Its state: squeue --jobs={self._job}; this cancels it: "
                    f"scancel {self._job}"
                ) from None
            return False
        self.state, self._heard = state, time.monotonic()
        return True

    def _answer(self) -> JobState:
        try:
            text = call("scontrol", "--oneliner", "show", "job", self._job)
        except StartError as error:
            if "Invalid job id" not in str(error):
                raise
            # Slurm forgets a job some minutes after its end; if it keeps accounts, they know.
            kept = call("sacct", "-j", self._job, "-X", "-n", "-P", "-o", "State,ExitCode")
            name, _, code = (kept.strip().splitlines() or [""])[0].partition("|")
            text = f"JobState={'+'.join(name.split()[:1])} ExitCode={code}"
        state = job_state(text)
        if state is None:
            raise StartError(f"scontrol does not tell the state of job {self._job}.")
        return state


@dataclasses.dataclass
class _Waiting:
    """Shows now and then why a job waits, and when it begins."""

    job: str
    note: Callable[[str, bool], None]
    _since: float = dataclasses.field(default_factory=time.monotonic)
    _told: tuple[str, float] | None = None

    def tell(self, state: JobState, midline: bool) -> None:
        """Shows the changes of a state."""
        now = time.monotonic()
        waits = state.name in ("PENDING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD")
        if not waits:
            if self._told is not None and state.nodes:
                self.note(f"job {self.job} runs on {state.nodes}", midline)
                self._told = None
            return
        words = f"job {self.job} waits: {state.reason or state.name.lower()}"
        known = self._told is not None and self._told[0] == words
        if known and self._told is not None and now - self._told[1] < _TELLS_AGAIN:
            return
        if self._told is not None or now - self._since > _WAITS_QUIETLY:
            self.note(words, midline)
            self._told = words, now


class _Cancelling:
    """Cancels a job and sees to it that it ends."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._deadline: float | None = None
        self._done = False

    def go_on(self, requests: Requests) -> None:
        """Cancels the job once Slurm can be reached.

        Raises:
            StartError: if it has not ended in time, or the user asks a second time.
        """
        now = time.monotonic()
        self._deadline = now + _TO_CANCEL if self._deadline is None else self._deadline
        if not self._done:
            with contextlib.suppress(StartError):
                call("scancel", self._job)
                self._done = True
        if now >= self._deadline or len(requests.received) > 1:
            done = "was cancelled, but has not ended yet" if self._done else "is not cancelled"
            raise StartError(
                f"Job {self._job} {done}. Its state: squeue --jobs={self._job}; this cancels it: "
                f"scancel {self._job}"
            )


# One `srun` within an allocation, from its start to its end.

_STEP_BLOCK = 1 << 16
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
        The exit status, and what Slurm wrote to standard error.

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
    """Passes on the output that comes within a moment; whether more may come."""
    if not select.select([stream], [], [], _POLL)[0]:
        return True
    data = os.read(stream, _STEP_BLOCK)
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
        """Does the next step, if it is time for it."""
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
