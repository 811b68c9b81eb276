"""Text for and from Slurm: a job's script and options, and the states that Slurm reports. Pure.

`srun` shows what rank 0 prints. The other ranks write their log files; their standard error, with
output of a task before it has a log, goes to a file of its own beside them. So a job of a hundred
tasks has one progress bar, and no word is lost.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tfdist.errors import StartError
from tfdist.launch.output import write_all

__all__ = [
    "ENDED",
    "Echo",
    "Failure",
    "JobState",
    "Step",
    "batch_script",
    "call",
    "failures",
    "job_state",
    "output_files",
    "srun",
    "stderr_file",
]

#: Run by each task before its command. The first argument is the log directory.
_SORT_OUTPUT = (
    'test "$SLURM_PROCID" = 0 || exec >/dev/null 2>"$0/rank-$SLURM_PROCID.err"; exec "$@"'
)

#: States of a job that has ended (squeue's manual page, "JOB STATE CODES").
ENDED = frozenset(
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
    place = str(step.log_dir).replace("%", "%%")
    options = (
        f"--job-name={step.name}",
        f"--ntasks={step.tasks}",
        *_gpus(step),
        f"--output={place}/job-%j.out",
        f"--error={place}/job-%j.err",
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
    found: dict[int, Failure] = {}
    stopped = False
    for line in lines:
        stopped = stopped or _ENDING_OTHERS.search(line) is not None
        match = _FAILED.match(line)
        returncode = _returncode(match[3]) if match else 0
        if match and returncode:
            for rank in _ranks(match[2]):
                found.setdefault(rank, Failure(rank, match[1], returncode, stopped))
    return tuple(found.values())


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


# Calls of Slurm's commands, each with a deadline, and their output to files and pipes.
#
# The commands run in sessions of their own, so that Ctrl-C on the terminal reaches them only
# through the process that starts them.

#: Seconds for one call: Slurm's commands themselves give up later.
_SECONDS = 20.0
#: Only lines of Slurm's own are kept.
_OWN = ("srun:", "slurmstepd")
_LONGEST_LINE = 1 << 16


def call(*words: str, seconds: float = _SECONDS) -> str:
    """The output of a command of Slurm.

    Raises:
        StartError: if it fails, with its own words, or does not answer in time.
    """
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise StartError(f"{words[0]} has not answered for {seconds:.0f} s.") from None
    except OSError as error:
        raise StartError(f"{words[0]} cannot be run: {error.strerror}.") from error
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise StartError(f"{words[0]} failed: {said[-500:]}")
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
