"""A job of Slurm: its script and options, what Slurm reports of it, and its watch to the end.

`srun` shows what rank 0 prints. The other ranks write their log files; their standard error, with
output of a task before it has a log, goes to a file of its own beside them. So a job of a hundred
tasks has one progress bar, and no word is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tfdist.errors import StartError
from tfdist.launcher.output import write_all
from tfdist.launcher.root_cause import exit_status
from tfdist.launcher.supervisor import Requests

__all__ = [
    "Failure",
    "JobState",
    "Step",
    "batch_script",
    "failures",
    "output_files",
    "run",
    "srun",
    "stderr_file",
    "submit",
    "watch",
]

#: Run by each task before its command. The first argument is the log directory.
_SORT_OUTPUT = (
    'test "$SLURM_PROCID" = 0 || exec >/dev/null 2>"$0/rank-$SLURM_PROCID.err"; exec "$@"'
)

#: States of a job that has ended (squeue's manual page, "JOB STATE CODES").
_ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)

_FAILED = re.compile(r"^srun: error: ([^:\s]+): tasks? ([\d,-]+): (.+)$")
_EXITED = re.compile(r"Exited with exit code (\d+)$")
_ENDING_OTHERS = re.compile(r"Terminating StepId=|error: \*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED")
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The tasks of a job.

    Attributes:
        name: Slurm's name for it.
        tasks: how many there are.
        command: the command of each.
        log_dir: where the logs go, an absolute path that all nodes have.
        gpus_per_task: GPUs of each task, or None to ask for none.
        arguments: further arguments of `srun`, or of `sbatch` if a batch script is made.
    """

    name: str
    tasks: int
    command: tuple[str, ...]
    log_dir: Path
    gpus_per_task: int | None = None
    arguments: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Failure:
    """A task that did not end well.

    Attributes:
        rank: its number.
        node: where it ran.
        returncode: as in `subprocess`: negative for a signal.
        stopped: whether Slurm was ending the step already.
    """

    rank: int
    node: str
    returncode: int
    stopped: bool


@dataclasses.dataclass(frozen=True)
class JobState:
    """The state of a job, as Slurm reports it.

    Attributes:
        name: such as `"PENDING"`.
        reason: why it waits or has ended; empty if Slurm gives none.
        status: its exit status: 128 + n if signal n ended it.
        nodes: where it runs; empty if it does not yet.
    """

    name: str
    reason: str = ""
    status: int = 0
    nodes: str = ""


def srun(step: Step, cpus_per_task: str | None = None) -> tuple[str, ...]:
    """The command that starts the tasks within an allocation.

    Args:
        step: the tasks.
        cpus_per_task: the allocation's CPUs of each task, which `srun` does not take over itself
            since Slurm 22.05.
    """
    cpus = () if cpus_per_task is None else (f"--cpus-per-task={cpus_per_task}",)
    return (
        *("srun", f"--job-name={step.name}", f"--ntasks={step.tasks}", *cpus, *_gpus(step)),
        *("--kill-on-bad-exit=1", *step.arguments),
        *_command(step),
    )


def batch_script(step: Step) -> str:
    """The script that `sbatch` takes, for the same tasks in an allocation of their own."""
    directory = str(step.log_dir).replace("%", "%%")
    options = (
        f"--job-name={step.name}",
        f"--ntasks={step.tasks}",
        *_gpus(step),
        f"--output={directory}/job-%j.out",
        f"--error={directory}/job-%j.err",
    )
    lines = [shlex.quote(option) for option in options]
    lines += [shlex.join(step.arguments)] if step.arguments else []
    asked = "".join(f"#SBATCH {line}\n" for line in lines)
    # The resources of each task are `srun`'s again, but for CPUs (Slurm 22.05 and later).
    cpus = "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
    words = shlex.join(_command(step))
    return (
        f"#!/bin/sh\n{asked}"
        f"exec srun --ntasks={step.tasks} --kill-on-bad-exit=1 {cpus} \\\n  {words}\n"
    )


def output_files(log_dir: Path, job: str) -> tuple[Path, Path]:
    """The files of a batch job's standard output and standard error."""
    return log_dir / f"job-{job}.out", log_dir / f"job-{job}.err"


def stderr_file(log_dir: Path, rank: int) -> Path:
    """The file of the standard error of a task other than the first."""
    return log_dir / f"rank-{rank}.err"


def failures(lines: Iterable[str]) -> tuple[Failure, ...]:
    """The failed tasks, as `srun` reports them on its standard error, in their order.

    Args:
        lines: the output of `srun` and the tasks.
    """
    by_rank: dict[int, Failure] = {}
    stopped = False
    for line in lines:
        stopped = stopped or _ENDING_OTHERS.search(line) is not None
        match = _FAILED.match(line)
        returncode = _returncode(match[3]) if match else 0
        if match and returncode:
            for rank in _ranks(match[2]):
                by_rank.setdefault(rank, Failure(rank, match[1], returncode, stopped))
    return tuple(by_rank.values())


def job_state(text: str) -> JobState | None:
    """The state in `scontrol --oneliner show job`'s answer; None if it is not such an answer."""
    state, reason, code, nodes = (
        match[1] if (match := re.search(rf"(?:^|\s){key}=(\S*)", text)) else ""
        for key in ("JobState", "Reason", "ExitCode", "NodeList")
    )
    if not state:
        return None
    exited, _, number = code.partition(":")
    status = 128 + int(number) if number.isdecimal() and int(number) else 0
    status = int(exited) if exited.isdecimal() and int(exited) else status
    empty = ("None", "(null)")
    return JobState(
        state.split("+")[0],
        "" if reason in empty else reason,
        status,
        "" if nodes in empty else nodes,
    )


def _gpus(step: Step) -> tuple[str, ...]:
    return () if not step.gpus_per_task else (f"--gpus-per-task={step.gpus_per_task}",)


def _command(step: Step) -> tuple[str, ...]:
    return ("sh", "-c", _SORT_OUTPUT, str(step.log_dir), *step.command)


def _returncode(words: str) -> int:
    """The exit status of a task, from `srun`'s words; 0 if they do not give it."""
    exited = _EXITED.search(words)
    if exited is None:
        return -_SIGNALS.get(words.removesuffix(" (core dumped)"), 0)
    status = int(exited[1])
    # The task is a launcher itself, which returns 128 + n if signal n ended the script.
    return 128 - status if status - 128 in signal.valid_signals() else status


def _ranks(text: str) -> list[int]:
    """The numbers of a list such as 0,2-4."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            ranks += range(int(first), int(last or first) + 1)
    return ranks


# From `sbatch` or `srun` to the end of a job.
#
# Slurm's commands run in sessions of their own, so that Ctrl-C on the terminal reaches them only
# through the process that starts them.

#: Seconds for one call: Slurm's commands themselves give up later.
_SECONDS = 20.0
#: Only lines of Slurm's own are kept.
_OWN = ("srun:", "slurmstepd")
_LONGEST_LINE = 1 << 16


def call(*words: str, seconds: float = _SECONDS) -> str:
    """The output of a command of Slurm; StartError with its own words if it fails."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise StartError(f"{words[0]} has not answered for {seconds:.0f} s.") from None
    except OSError as error:
        raise StartError(f"{words[0]} cannot be run: {error.strerror}.") from error
    if done.returncode:
        errors = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise StartError(f"{words[0]} failed: {errors[-500:]}")
    return done.stdout


class Echo:
    """Passes bytes on unchanged, and keeps the lines that are Slurm's own.

    Args:
        target: a descriptor.

    Attributes:
        lines: Slurm's lines so far.
        midline: whether the last output left the terminal's cursor within a line.
    """

    def __init__(self, target: int) -> None:
        self.lines: list[str] = []
        self.midline = False
        self._target: int | None = target
        self._part = b""

    def feed(self, data: bytes) -> None:
        """Passes some bytes on."""
        *lines, part = (self._part + data).split(b"\n")
        self._part = part[-_LONGEST_LINE:]
        texts = (line.decode(errors="replace") for line in lines)
        self.lines += [text for text in texts if text.startswith(_OWN)]
        if self._target is None or not data:
            return
        try:
            write_all(self._target, data)
            self.midline = not data.endswith(b"\n")
        except OSError:
            self._target = None  # The reader of this command's output has gone away.


_BLOCK = 1 << 16
#: Seconds between two polls of the output.
_POLL_SECONDS = 0.2
#: Seconds between two questions to Slurm: at first, and at most. They grow with the job's age.
_ASK_FIRST, _ASK_AT_MOST = 0.5, 10.0
#: Seconds in which questions may fail, as while Slurm's controller is started again.
_PATIENCE = 300.0
#: Seconds in which a job waits before the user is notified, and seconds until the next notice.
_WAITS_QUIETLY, _REPEATS_AFTER = 5.0, 300.0
#: Seconds for a cancelled job to end: its tasks get Slurm's KillWait, 30 s by default.
_TO_CANCEL = 90.0
#: Seconds for the last lines to come over a file system of several machines.
_TO_SETTLE = 1.0
_SECONDS_TO_SUBMIT = 120.0


def submit(script: Path) -> str:
    """Submits a batch script; the job's number."""
    output = call("sbatch", "--parsable", str(script), seconds=_SECONDS_TO_SUBMIT)
    return output.strip().splitlines()[-1].partition(";")[0]


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
        ended = asking.state.name in _ENDED
        if ended:
            time.sleep(_TO_SETTLE)
        out.copy()
        error.copy()
        if ended:
            return asking.state, error.echo.lines
        if requests.received:
            cancelling.go_on(requests)
        if asking.ask(hurry=bool(requests.received)):
            waiting.show(asking.state, out.echo.midline or error.echo.midline)
        time.sleep(_POLL_SECONDS)


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
    _shown: tuple[str, float] | None = None

    def show(self, state: JobState, midline: bool) -> None:
        """Shows the changes of a state."""
        now = time.monotonic()
        waits = state.name in ("PENDING", "CONFIGURING", "SUSP_ENDED", "REQUEUED", "REQUEUE_HOLD")
        if not waits:
            if self._shown is not None and state.nodes:
                self.note(f"job {self.job} runs on {state.nodes}", midline)
                self._shown = None
            return
        words = f"job {self.job} waits: {state.reason or state.name.lower()}"
        if self._shown is not None:
            shown, since = self._shown
            if shown == words and now - since < _REPEATS_AFTER:
                return
        if self._shown is not None or now - self._since > _WAITS_QUIETLY:
            self.note(words, midline)
            self._shown = words, now


class _Cancelling:
    """Cancels a job and sees to it that it ends."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._deadline: float | None = None
        self._done = False

    def go_on(self, requests: Requests) -> None:
        """Cancels the job once Slurm can be reached; a second signal gives it up."""
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
    if not select.select([stream], [], [], _POLL_SECONDS)[0]:
        return True
    data = os.read(stream, _BLOCK)
    echo.feed(data)
    if not data:
        time.sleep(_POLL_SECONDS)  # It is about to end.
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
