"""Sees to it that a fitting Horovod is installed: it is there, was built before, or is built now.

A wheel is tried out before it is installed or kept, so the environment has the Horovod from before
or one that works.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import hashlib
import importlib
import importlib.metadata
import importlib.util
import mmap
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tfdist.cluster.validation.machine import installed_version
from tfdist.errors import TfdistError
from tfdist.horovod.installer import compile, requirements, wheel_cache
from tfdist.horovod.installer.commands import PIP_HINT, CommandError, Commands, Progress
from tfdist.horovod.installer.compile import MARK, VERSION
from tfdist.horovod.installer.requirements import Choice
from tfdist.horovod.installer.smoke_test import verify
from tfdist.strategies.horovod.library import built_for

__all__ = [
    "Done",
    "Order",
    "Outcome",
    "ensure",
    "fits",
    "get_dependencies",
    "install",
    "is_intact",
    "operations",
]


#: The packages that Horovod imports besides TensorFlow.
_DEPENDENCIES = ("cloudpickle", "psutil", "pyyaml", "packaging")

#: A string in the library for each feature that it was built with.
_MARKS = {"Gloo": b"_ZN4gloo", "MPI": b"MPI_Init_thread", "NCCL": b"ncclCommInitRank"}
_PIP = (sys.executable, "-m", "pip", "install")


def operations() -> tuple[str, ...]:
    """With what the installed Horovod exchanges tensors: of Gloo, MPI and NCCL."""
    spec = importlib.util.find_spec("horovod")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(folder, "tensorflow").glob("mpi_lib*.so")):
            with library.open("rb") as file:
                if library.stat().st_size == 0:
                    return ()
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    return tuple(name for name, mark in _MARKS.items() if content.find(mark) >= 0)
    return ()


def is_intact() -> bool:
    """Whether every file of the installed Horovod is there as pip wrote it."""
    try:
        listed = importlib.metadata.files("horovod") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    return bool(listed) and all(map(_is_intact, listed))


def _is_intact(path: importlib.metadata.PackagePath) -> bool:
    file = Path(str(path.locate()))
    if path.hash is None:  # Compiled Python, which is made anew, and the list itself.
        return True
    if not file.is_file() or file.stat().st_size != (path.size or 0):
        return False
    digest = hashlib.new(path.hash.mode, file.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == path.hash.value


def fits(choice: Choice, tensorflow: str) -> bool:
    """Whether what is installed is what would be built. It may have more operations."""
    return (
        built_for() == tensorflow
        and installed_version("horovod") == f"{VERSION}+{MARK}"
        and set(choice.operations) <= set(operations())
        and is_intact()
    )


def get_dependencies(commands: Commands, folder: Path | None) -> None:
    """Installs the packages that Horovod imports, by default into this Python environment."""
    target = [] if folder is None else ["--target", str(folder)]
    commands.run(
        "The installation of what Horovod needs by pip",
        [*_PIP, *target, *_DEPENDENCIES],
        changes={"PIP_USER": "0"} if folder else None,
        hint=PIP_HINT,
    )


def install(commands: Commands, wheel: Path) -> None:
    """Installs a wheel in place of the Horovod that is there. A stop signal waits for its end."""
    commands.run(
        "The installation of the wheel by pip",
        [*_PIP, "--no-deps", "--no-index", "--force-reinstall", str(wheel)],
        shielded=True,
        hint="Is this Python environment writable? `python -m venv` makes one that is.",
    )
    importlib.invalidate_caches()


class Done(enum.Enum):
    """The actions that were necessary."""

    NOTHING = "is there already"
    REUSED = "is installed, from a wheel that was built before"
    BUILT = "is built and installed"


@dataclasses.dataclass(frozen=True)
class Order:
    """The request for a build.

    Attributes:
        choice: the features that Horovod is built with.
        force: build it in any case.
        wheel_dir: put the wheel there and install nothing.
    """

    choice: Choice
    force: bool = False
    wheel_dir: Path | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a request.

    Attributes:
        done: how it came about.
        tensorflow: the version of TensorFlow that it is for.
        operations: the libraries with which it exchanges tensors.
        seconds: how long that took.
        wheel: the wheel; None if nothing was to be done.
        log: the log of the commands; None likewise.
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
        order: the request.
        progress: called with the progress.

    Raises:
        ConfigError: if something that the build needs is missing.
        TfdistError: if a step fails, or a signal stops it. The wheel installed before is kept.
    """
    tensorflow = requirements.tensorflow_version()
    if not (order.force or order.wheel_dir) and fits(order.choice, tensorflow):
        return Outcome(Done.NOTHING, tensorflow, operations())
    job = _Job(order, wheel_cache.entry(order.choice, tensorflow), progress, time.monotonic())
    waiting = "waiting for another process that builds the same wheel"
    try:
        with job.entry.locked(lambda: progress.phase(waiting)):
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
    entry: wheel_cache.Entry
    progress: Progress
    began: float

    def reuse(self) -> Outcome | None:
        """Installs the wheel that was built before; None if there is none that works."""
        wheel = self.entry.wheel()
        if wheel is None:
            return None
        problem = wheel_cache.wheel_problem(wheel, self.entry.tensorflow)
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
            shop = compile.Workshop(folder, tools, commands, self.progress)
            built = compile.build(shop, self.order.choice)
            problem = wheel_cache.wheel_problem(built, self.entry.tensorflow)
            if problem:
                raise TfdistError(f"The wheel that was built is not used: {problem}.")
            verify(commands, self._unpack(commands, built, folder))
            self.entry.discard()
            return self._hand_over(commands, self.entry.store(built), Done.BUILT)

    @contextlib.contextmanager
    def _commands(self, what: str) -> Iterator[tuple[Commands, Path]]:
        """A runner of commands, and a temporary directory for all that they write."""
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
        get_dependencies(commands, trial if self.order.wheel_dir else None)
        self.progress.phase("testing it: an all-reduce of two processes")
        shutil.unpack_archive(wheel, trial, "zip")
        return trial

    def _hand_over(self, commands: Commands, wheel: Path, done: Done) -> Outcome:
        if self.order.wheel_dir is not None:
            wheel = wheel_cache.Entry(self.order.wheel_dir, self.entry.tensorflow).store(wheel)
        else:
            self.progress.phase("installing it")
            install(commands, wheel)
            if not fits(self.order.choice, self.entry.tensorflow):
                raise TfdistError(
                    "pip installed the wheel, but this Python does not find it: another horovod "
                    "comes before it in sys.path, or pip's settings name another place (`pip "
                    "config list`)."
                )
        return Outcome(
            done,
            self.entry.tensorflow,
            self.order.choice.operations,
            time.monotonic() - self.began,
            wheel,
            commands.log,
        )
