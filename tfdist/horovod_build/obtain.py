"""Sees to it that a fitting Horovod is installed: it is there, was built before, or is built now.

A wheel is tried out before it is installed or kept, so the environment has the Horovod from before
or one that works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tfdist import files
from tfdist.errors import TfdistError
from tfdist.horovod_build import cache, compiling, installed, requirements
from tfdist.horovod_build.choice import Choice
from tfdist.horovod_build.commands import CommandError, Commands
from tfdist.horovod_build.progress import Progress
from tfdist.horovod_build.verify import verify

__all__ = ["Done", "Order", "Outcome", "ensure"]


class Done(enum.Enum):
    """What had to be done."""

    NOTHING = "is there already"
    REUSED = "is installed, from a wheel that was built before"
    BUILT = "is built and installed"


@dataclasses.dataclass(frozen=True)
class Order:
    """What is asked for.

    Attributes:
        choice: what Horovod is built with.
        force: build it in any case.
        wheel_dir: put the wheel there and install nothing.
    """

    choice: Choice
    force: bool = False
    wheel_dir: Path | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was done.

    Attributes:
        done: how it came about.
        tensorflow: the version of TensorFlow that it is for.
        operations: what it exchanges tensors with.
        seconds: how long that took.
        wheel: the wheel; None where nothing was to be done.
        log: the log of what was run; None likewise.
    """

    done: Done
    tensorflow: str
    operations: tuple[str, ...]
    seconds: float = 0.0
    wheel: Path | None = None
    log: Path | None = None


def ensure(order: Order, progress: Progress) -> Outcome:
    """Installs Horovod for the installed TensorFlow, unless it is there.

    Call it in the main thread: it handles the signals that would end the process.

    Args:
        order: what is asked for.
        progress: is told how far it is.

    Raises:
        ConfigError: if something that the build needs is missing.
        TfdistError: if a step fails, or a signal stops it. What was installed before is as it was.
    """
    tensorflow = requirements.tensorflow_version()
    if not (order.force or order.wheel_dir) and installed.fits(order.choice, tensorflow):
        return Outcome(Done.NOTHING, tensorflow, installed.operations())
    job = _Job(order, cache.entry(order.choice, tensorflow), progress, time.monotonic())
    try:
        with job.entry.locked(job.waiting):
            return (None if order.force else job.reuse()) or job.make()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise TfdistError(
            f"Horovod could not be built or installed: {where}{error.strerror or error}. Make room "
            "there, or make it writable. XDG_CACHE_HOME and TMPDIR name other places for the "
            "wheels that are kept and for the build."
        ) from error


@dataclasses.dataclass(frozen=True)
class _Job:
    order: Order
    entry: cache.Entry
    progress: Progress
    began: float

    def waiting(self) -> None:
        self.progress.phase("waiting for another process that builds the same wheel")

    def reuse(self) -> Outcome | None:
        """Installs the wheel that was built before; None where there is none that works."""
        wheel = self.entry.wheel()
        if wheel is None:
            return None
        problem = cache.wheel_problem(wheel, self.entry.tensorflow)
        if problem is None:
            with self._commands("install") as (commands, folder):
                trial = self._unpack(commands, wheel, folder)
                try:
                    verify(commands, trial)
                except CommandError:
                    problem = f"it failed its test (log: {commands.log})"
                else:
                    return self._hand_over(commands, wheel, Done.REUSED)
        self.progress.note(f"The wheel {wheel} is not used: {problem}. It is built anew.")
        self.entry.discard()
        return None

    def make(self) -> Outcome:
        """Builds the wheel and installs it."""
        self.progress.phase("looking for what the build needs")
        tools = requirements.check(
            self.order.choice,
            {
                "the build": (Path(tempfile.gettempdir()), requirements.BUILD_BYTES),
                "the wheel": (self.entry.folder, requirements.WHEEL_BYTES),
                "the package": (Path(sysconfig.get_path("platlib")), requirements.WHEEL_BYTES),
            },
        )
        with self._commands("build") as (commands, folder):
            shop = compiling.Workshop(folder, tools, commands, self.progress)
            built = compiling.build(shop, self.order.choice)
            problem = cache.wheel_problem(built, self.entry.tensorflow)
            if problem:
                raise TfdistError(f"The wheel that was built is not used: {problem}.")
            verify(commands, self._unpack(commands, built, folder))
            self.entry.discard()
            return self._hand_over(commands, self.entry.store(built), Done.BUILT)

    @contextlib.contextmanager
    def _commands(self, what: str) -> Iterator[tuple[Commands, Path]]:
        """What runs commands, and a temporary directory for all that they write."""
        with (
            tempfile.TemporaryDirectory(prefix="tfdist-horovod-") as name,
            Commands(self.entry.log(what), Path(name)) as commands,
        ):
            yield commands, Path(name)

    def _unpack(self, commands: Commands, wheel: Path, folder: Path) -> Path:
        """A directory from which the wheel can be tried out."""
        trial = folder / "trial"
        self.progress.phase("getting the packages that Horovod needs")
        # The environment is left alone if only the wheel is wanted.
        installed.get_dependencies(commands, trial if self.order.wheel_dir else None)
        self.progress.phase("testing it: an all-reduce of two processes")
        installed.unpack(commands, wheel, trial)
        return trial

    def _hand_over(self, commands: Commands, wheel: Path, done: Done) -> Outcome:
        if self.order.wheel_dir is not None:
            target = self.order.wheel_dir / wheel.name
            with files.replacing(str(target)) as partial:
                shutil.copyfile(wheel, partial)
        else:
            target = wheel
            self.progress.phase("installing it")
            installed.install(commands, wheel)
            self._check_installed()
        return Outcome(
            done,
            self.entry.tensorflow,
            self.order.choice.operations,
            time.monotonic() - self.began,
            target,
            commands.log,
        )

    def _check_installed(self) -> None:
        if not installed.fits(self.order.choice, self.entry.tensorflow):
            raise TfdistError(
                "pip installed the wheel, but this Python does not find it: another horovod comes "
                "before it in sys.path, or pip's settings name another place (`pip config list`)."
            )
