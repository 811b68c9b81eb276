"""The Horovod of this Python environment, looked at without importing it, and put in its place."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import importlib.util
import mmap
import sys
from pathlib import Path

from tfdist.doctor.versions import installed_version
from tfdist.horovod.library import built_for
from tfdist.horovod_build.choice import Choice
from tfdist.horovod_build.commands import PIP_HINT, Commands
from tfdist.horovod_build.source import MARK, VERSION

__all__ = ["fits", "get_dependencies", "install", "is_intact", "operations", "unpack"]

#: What Horovod imports besides TensorFlow.
_DEPENDENCIES = ("cloudpickle", "psutil", "pyyaml", "packaging")

#: What is in the library if it was built with something.
_MARKS = {"Gloo": b"_ZN4gloo", "MPI": b"MPI_Init_thread", "NCCL": b"ncclCommInitRank"}
_PIP = (sys.executable, "-m", "pip", "install")


def operations() -> tuple[str, ...]:
    """With what the installed Horovod exchanges tensors: of Gloo, MPI and NCCL."""
    spec = importlib.util.find_spec("horovod")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(place, "tensorflow").glob("mpi_lib*.so")):
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
    place = Path(str(path.locate()))
    if path.hash is None:  # Compiled Python, which is made anew, and the list itself.
        return True
    if not place.is_file() or place.stat().st_size != (path.size or 0):
        return False
    digest = hashlib.new(path.hash.mode, place.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == path.hash.value


def fits(choice: Choice, tensorflow: str) -> bool:
    """Whether what is installed is what would be built. It may have more operations.

    Args:
        choice: what is asked for.
        tensorflow: the version of TensorFlow that it must be built for.
    """
    return (
        built_for() == tensorflow
        and installed_version("horovod") == f"{VERSION}+{MARK}"
        and set(choice.operations) <= set(operations())
        and is_intact()
    )


def get_dependencies(commands: Commands, folder: Path | None) -> None:
    """Installs what Horovod imports.

    Args:
        commands: runs pip.
        folder: where to; by default into this Python environment, if it is not there.
    """
    place = [] if folder is None else ["--target", str(folder)]
    commands.run(
        "The installation of what Horovod needs by pip",
        [*_PIP, *place, *_DEPENDENCIES],
        changes={"PIP_USER": "0"} if folder else None,
        hint=PIP_HINT,
    )


def unpack(commands: Commands, wheel: Path, folder: Path) -> None:
    """Puts the content of a wheel into a directory, to be tried out."""
    commands.run(
        "Unpacking the wheel by pip",
        [*_PIP, "--no-deps", "--no-index", "--target", str(folder), str(wheel)],
        changes={"PIP_USER": "0"},
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
