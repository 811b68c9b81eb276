"""Wheels that were built before, so that the next environment need not build its own."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import platform
import re
import shutil
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tfdist import environment
from tfdist.horovod.installer.compile import MARK, VERSION
from tfdist.horovod.installer.requirements import KEPT_VARIABLES, Choice, find_nccl, find_nvcc
from tfdist.utils import atomic_io

__all__ = ["Entry", "entry", "wheel_problem"]

_LIBRARY = re.compile(r"horovod/tensorflow/mpi_lib.*\.so")
_METADATA = "horovod/metadata.json"
#: Variables, besides Horovod's, that change what a compiler makes.
_COMPILER_VARIABLES = ("CFLAGS", "CPPFLAGS", "CXX", "CXXFLAGS", "LDFLAGS")
#: The instructions that Horovod's build uses if the machine has them.
_INSTRUCTIONS = ("avx", "f16c", "fma")
_POLL = 0.2


@dataclasses.dataclass(frozen=True)
class Entry:
    """The place of one wheel: what was built for one TensorFlow, Python, machine and choice.

    Attributes:
        folder: where it is; need not exist.
        tensorflow: the version of TensorFlow that it is for.
    """

    folder: Path
    tensorflow: str

    def log(self, what: str) -> Path:
        """The log of the last time that something was done with this wheel, such as "build"."""
        return self.folder / f"{what}.log"

    def wheel(self) -> Path | None:
        """The wheel, or None if there is none. It may be damaged."""
        return next(iter(sorted(self.folder.glob("*.whl"))), None)

    def store(self, wheel: Path) -> Path:
        """Copies a wheel here. It is there as a whole or not at all, whatever happens."""
        stored = self.folder / wheel.name
        with atomic_io.replacing(str(stored)) as partial:
            shutil.copyfile(wheel, partial)
        return stored

    def discard(self) -> None:
        """Removes the wheel."""
        for wheel in self.folder.glob("*.whl"):
            wheel.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Lets one process at a time build this wheel, and makes the folder.

        Args:
            waiting: called once if another process has the lock.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            if not _lock(lock.fileno()):
                waiting()
            while not _lock(lock.fileno()):
                time.sleep(_POLL)
            yield


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def entry(choice: Choice, tensorflow: str) -> Entry:
    """The place of the wheel for this Python and machine."""
    root = Path(environment.read("XDG_CACHE_HOME") or "~/.cache").expanduser()
    abi = sysconfig.get_config_var("SOABI") or platform.python_version()
    operations = "-".join(choice.operations).lower()
    name = f"{VERSION}+{MARK}-tf{tensorflow}-{abi}-{operations}-{_digest(choice)}"
    return Entry(root / "tfdist" / "horovod" / name, tensorflow)


def _digest(choice: Choice) -> str:
    """A digest of all else that decides whether a wheel built there runs here."""
    environ = environment.snapshot()
    mpi = [shutil.which("mpicxx")] if choice.mpi else []
    cuda = [str(find_nvcc(environ)), str(find_nccl(environ))] if choice.nccl else []
    names = (*KEPT_VARIABLES, *_COMPILER_VARIABLES)
    variables = {name: environ[name] for name in names if environ.get(name)}
    machine = [platform.libc_ver(), sysconfig.get_platform(), _instructions()]
    facts = [variables, machine, mpi, cuda]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def _instructions() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    return [name for name in _INSTRUCTIONS if name in known]


def wheel_problem(wheel: Path, tensorflow: str) -> str | None:
    """The reason why a wheel must not be installed for a version of TensorFlow, or None."""
    try:
        with zipfile.ZipFile(wheel) as content:
            broken = content.testzip()
            names = content.namelist()
            metadata = json.loads(content.read(_METADATA)) if _METADATA in names else {}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        return f"it is damaged ({error})"
    if broken:
        return f"it is damaged (in {broken})"
    against = metadata.get("tensorflow")
    if against is None or not any(map(_LIBRARY.fullmatch, names)):
        return "it was built without TensorFlow"
    if against != tensorflow:
        return f"it was built for TensorFlow {against}, and this is TensorFlow {tensorflow}"
    return None
