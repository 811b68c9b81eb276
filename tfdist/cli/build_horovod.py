"""`tfdist build-horovod`: one command from the released source to a Horovod that works here."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from tfdist.cli.summary import duration
from tfdist.errors import ConfigError
from tfdist.horovod.installer import Done, Order, Outcome, Progress, ensure
from tfdist.horovod.installer.compile import VERSION
from tfdist.horovod.installer.requirements import GPU_CHOICES, chosen
from tfdist.utils.atomic_io import check_writable

_GPU_HELP = "; ".join(f"{name}: {what}" for name, what in GPU_CHOICES.items()) + "."


def build_horovod(
    force: Annotated[
        bool, typer.Option("--force", help="Build it anew, whatever is there.")
    ] = False,
    mpi: Annotated[
        bool, typer.Option("--mpi/--no-mpi", help="Also with MPI, which needs mpicxx.")
    ] = False,
    gpu: Annotated[str, typer.Option(metavar="NAME", help=_GPU_HELP)] = "auto",
    wheel_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the wheel there and install nothing."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Build Horovod for the installed TensorFlow, test it and install it.

    Only strategy horovod needs it. PyPI has Horovod's source, which does not compile against
    current TensorFlow as it is. Four places are changed: a file for XLA is left out, two repairs of
    jobs over Gloo, and for NCCL a function that TensorFlow lacks. It takes some minutes the first
    time. The wheel is kept, so the next environment takes seconds, and where
    Horovod is there already nothing is done.

    Needs pip and a C++ compiler. CMake is got by pip where it is missing. The test is an all-reduce
    of two processes over Gloo.

    Example: tfdist build-horovod

    Exit status: 0 if Horovod is there, 1 if a step failed, 2 if something is missing; 130 after
    Ctrl-C.
    """
    if gpu not in GPU_CHOICES:
        raise ConfigError(f"--gpu {gpu!r} is not one of {', '.join(GPU_CHOICES)}.")
    if wheel_dir is not None and wheel_dir.exists() and not wheel_dir.is_dir():
        raise ConfigError(f"--wheel-dir {str(wheel_dir)!r} is not a directory. Name a directory.")
    if wheel_dir is not None:
        check_writable(str(wheel_dir / "wheel"), f"--wheel-dir {wheel_dir}")
    with _shown(quiet) as progress:
        outcome = ensure(Order(chosen(mpi, gpu), force, wheel_dir), progress)
    if not quiet:
        print(_summary(outcome, wheel_dir))


def _summary(outcome: Outcome, wheel_dir: Path | None) -> str:
    what = (
        f"Horovod {VERSION} for TensorFlow {outcome.tensorflow}, with "
        f"{', '.join(outcome.operations)},"
    )
    if outcome.done is Done.NOTHING:
        return f"{what} {outcome.done.value}. --force builds it anew."
    took = f"({duration(outcome.seconds)})"
    if wheel_dir is not None:
        return f"{what} is tested {took} and written: {outcome.wheel}"
    return f"{what} {outcome.done.value} {took}. The wheel is kept: {outcome.wheel}"


@contextlib.contextmanager
def _shown(quiet: bool) -> Iterator[Progress]:
    """Shows progress as the place allows: bars on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield _Lines(quiet)
    else:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
        )
        with Bars(*columns, console=console, transient=True) as bars:
            yield _Terminal(bars)


class _Lines:
    """A line for each phase, and one for each quarter of it; if `quiet`, notes only."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._began, self._text, self._quarter = time.monotonic(), "", 0

    def phase(self, text: str) -> None:
        """See `Progress`."""
        self._text, self._quarter = text, 0
        if not self._quiet:
            self.note(f"{text} …")

    def fraction(self, done: float) -> None:
        """See `Progress`."""
        if int(done * 4) > self._quarter and not self._quiet:
            self._quarter = int(done * 4)
            self.note(f"{self._text}: {25 * self._quarter} %")

    def note(self, text: str) -> None:
        """See `Progress`."""
        when = "" if self._quiet else f"[{duration(time.monotonic() - self._began)}] "
        print(f"tfdist: {when}{text}", file=sys.stderr, flush=True)


class _Terminal:
    """One line that changes: the phase, a bar, and the time since the start."""

    def __init__(self, bars: Bars) -> None:
        self._bars, self._task = bars, bars.add_task("", total=None)

    def phase(self, text: str) -> None:
        """See `Progress`."""
        self._bars.update(self._task, description=text, total=None, completed=0)

    def fraction(self, done: float) -> None:
        """See `Progress`."""
        self._bars.update(self._task, total=1.0, completed=done)

    def note(self, text: str) -> None:
        """See `Progress`."""
        self._bars.console.print(text, markup=False, highlight=False)
