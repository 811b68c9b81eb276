"""Turns the patched source into a wheel."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tfdist import environment
from tfdist.doctor.machine import cpu_count, memory
from tfdist.horovod_build import source
from tfdist.horovod_build.choice import KEPT_VARIABLES, Choice, find_nvcc
from tfdist.horovod_build.commands import PIP_HINT, Commands
from tfdist.horovod_build.progress import Progress, percentages
from tfdist.horovod_build.requirements import Tools

__all__ = ["Workshop", "build"]

#: Python packages of the build, in the versions that were tried. They go into a directory of the
#: build, not into the user's environment.
_PACKAGES = ("setuptools>=70.1,<85", "packaging")
_CMAKE, _NINJA = "cmake>=3.18,<5", "ninja"
#: Memory that one run of the compiler may take.
_BYTES_A_JOB = 1536 << 20
_HINT = "If there is another C++ compiler, name it in CXX and run this again."


@dataclasses.dataclass(frozen=True)
class Workshop:
    """Where and with what a wheel is built.

    Attributes:
        folder: a temporary directory.
        tools: what the machine has.
        commands: runs the build's commands.
        progress: is told how far it is.
    """

    folder: Path
    tools: Tools
    commands: Commands
    progress: Progress

    @property
    def packages(self) -> Path:
        """The directory of the build's own Python packages."""
        return self.folder / "packages"


def build(shop: Workshop, choice: Choice) -> Path:
    """Builds the wheel.

    Args:
        shop: where and with what.
        choice: what to build.

    Raises:
        TfdistError: if a step fails.
    """
    shop.progress.phase("getting the build tools")
    _get_packages(shop)
    changes = _changes(shop, choice)
    shop.progress.phase(f"downloading the source of Horovod {source.VERSION}")
    archive = source.download(shop.commands, shop.folder, changes)
    tree = source.unpack(archive, shop.folder / "source")
    source.patch(tree, choice)
    shop.progress.phase(f"compiling with {_jobs()} job{'s' if _jobs() > 1 else ''}")
    out = shop.folder / "wheel"
    shop.commands.run(
        f"The compilation of Horovod {source.VERSION}",
        # Quiet: else it gives the build tool an option that ninja does not know.
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(out)],
        changes={**changes, "HOROVOD_LOCAL_VERSION": source.MARK},
        folder=tree,
        each=percentages(shop.progress),
        hint=_HINT,
    )
    return next(out.glob("*.whl"))


def _get_packages(shop: Workshop) -> None:
    wanted = list(_PACKAGES)
    wanted += [] if shop.tools.cmake else [_CMAKE]
    wanted += [] if shop.tools.make else [_NINJA]
    tool = "" if shop.tools.cmake else "CMake 3.13 or later is not in PATH, so pip must get it. "
    shop.commands.run(
        "Getting the build tools by pip",
        [
            *(sys.executable, "-m", "pip", "install", "--no-warn-conflicts", "--upgrade"),
            *("--target", str(shop.packages), *wanted),
        ],
        changes={"PIP_USER": "0"},
        hint=f"{tool}{PIP_HINT}",
    )


def _changes(shop: Workshop, choice: Choice) -> dict[str, str | None]:
    """What the build's commands find in their environment."""
    given = environment.snapshot()
    unset: dict[str, str | None] = {
        name: None for name in given if name.startswith("HOROVOD_") and name not in KEPT_VARIABLES
    }
    # What `make test` would hand down to the make of the build.
    unset |= dict.fromkeys(("MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"))
    folders = (str(shop.packages / "bin"), given.get("PATH", ""))
    jobs = str(_jobs())
    return {
        **unset,
        **choice.variables(),
        **(_cuda(given) if choice.nccl else {}),
        "PATH": os.pathsep.join(folders),
        "PYTHONPATH": str(shop.packages),
        "CXX": shop.tools.compiler,
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        # CMake 4 refuses the age that third-party parts of the source ask for.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_CMAKE": shop.tools.cmake or str(shop.packages / "bin" / "cmake"),
        "CMAKE_GENERATOR": "Unix Makefiles" if shop.tools.make else "Ninja",
        "LDFLAGS": _linker_flags(given.get("LDFLAGS", "")),
    }


def _cuda(given: Mapping[str, str]) -> dict[str, str]:
    """Where CUDA is; left to itself the build may find an nvcc that lies elsewhere."""
    nvcc = find_nvcc(given)
    home = nvcc.resolve().parent.parent if nvcc else None
    if home is None or not (home / "include" / "cuda_runtime.h").is_file():
        return {}
    return {"HOROVOD_CUDA_HOME": str(home), "CUDAToolkit_ROOT": str(home)}


def _linker_flags(given: str) -> str:
    """Leaves out what only a debugger reads: nine tenths of the library."""
    return f"{given} -Wl,--strip-debug".strip() if sys.platform.startswith("linux") else given


def _jobs() -> int:
    """How many files are compiled at a time."""
    wanted = environment.snapshot().get("CMAKE_BUILD_PARALLEL_LEVEL", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return max(1, min(cpu_count(), memory() // _BYTES_A_JOB))
