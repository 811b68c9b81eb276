"""Calls of Slurm's commands, each with a deadline, and what they write to files and pipes.

The commands run in sessions of their own, so that Ctrl-C on the terminal reaches them only through
the process that starts them.
"""

from __future__ import annotations

import subprocess

from tfdist.cluster.launch.output import write_all
from tfdist.errors import StartError

__all__ = ["Echo", "call"]

#: Seconds for one call: Slurm's commands themselves give up later.
_SECONDS = 20.0
#: Only lines of Slurm's own are kept.
_OWN = ("srun:", "slurmstepd")
_LONGEST_LINE = 1 << 16


def call(*words: str, seconds: float = _SECONDS) -> str:
    """What a command of Slurm prints.

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
        midline: whether what was passed on last left the terminal's cursor within a line.
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
