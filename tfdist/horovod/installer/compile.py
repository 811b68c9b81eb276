"""Turns the patched source into a wheel."""

from __future__ import annotations

import dataclasses
import os
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tfdist import environment
from tfdist.cluster.validation.machine import cpu_count, memory
from tfdist.errors import TfdistError
from tfdist.horovod.installer.commands import PIP_HINT, Commands, Progress, percentages
from tfdist.horovod.installer.requirements import KEPT_VARIABLES, Choice, Tools, find_nvcc

__all__ = ["MARK", "VERSION", "Workshop", "build", "download", "patch", "unpack"]


#: The release that is built: the last one.
VERSION = "0.28.1"

#: Marks a build from the changed source: a part of the version that pip shows.
MARK = "tfdist2"


@dataclasses.dataclass(frozen=True)
class _Change:
    """A line of the source that is replaced.

    Attributes:
        path: the file.
        old: text that only that line contains.
        new: the text instead.
        nccl: whether it is needed for GPUs only.
    """

    path: str
    old: str
    new: str
    nccl: bool = False


_CHANGES = (
    # Registers Horovod's operations with XLA; includes a header that TensorFlow no longer ships.
    # Without it Horovod's operations run outside of XLA's programs.
    _Change("horovod/tensorflow/CMakeLists.txt", "xla_mpi_ops.cc", ""),
    # Written to but left empty as released, so that stalled ranks are looked for in an empty list.
    _Change(
        "horovod/common/gloo/gloo_controller.cc",
        "global_ranks_.reserve(size_);",
        "  global_ranks_.resize(size_);\n",
    ),
    # A process set is given no network interface and takes the one of the host's own name, which is
    # loopback on many machines: as released, jobs over several of them then do not start.
    _Change(
        "horovod/common/gloo/gloo_context.cc",
        "global_ctx = global_context.ctx;",
        "  global_ctx = global_context.ctx;\n"
        "  gloo_iface_ = global_context.gloo_iface_;\n"
        "  device_attr.iface = gloo_iface_;\n"
        "  dev = CreateDevice(device_attr);\n",
    ),
    # A function that TensorFlow no longer exports, replaced by its own code. A template, since the
    # type is known only by its name at that place.
    _Change(
        "horovod/tensorflow/mpi_ops.cc",
        "GpuStreamHandle AsGpuStreamValue(Stream* stream);",
        "template <class S>\n"
        "GpuStreamHandle AsGpuStreamValue(S* stream) {\n"
        "  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\n"
        "}\n",
        nccl=True,
    ),
)


def download(commands: Commands, folder: Path, changes: dict[str, str | None]) -> Path:
    """Gets the released source from the index that pip is configured for, into a folder.

    The environment's changes let pip find setuptools: it asks the source for its name.
    """
    commands.run(
        f"The download of Horovod {VERSION}",
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"),
            *("--no-binary", "horovod", "--dest", str(folder), f"horovod=={VERSION}"),
        ],
        changes=changes,
        hint=PIP_HINT,
    )
    return next(folder.glob("horovod-*.tar.gz"))


def unpack(archive: Path, folder: Path) -> Path:
    """Unpacks the source and returns its directory."""
    with tarfile.open(archive) as content:
        # Python 3.11.4 and later can refuse members that would be written elsewhere.
        content.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        content.extractall(folder)
    return next(path for path in folder.iterdir() if path.is_dir())


def patch(source: Path, choice: Choice) -> None:
    """Changes the lines of the release that are wrong for current TensorFlow; see `_CHANGES`.

    Raises:
        TfdistError: if the source is not as the release was.
    """
    for change in _CHANGES:
        if change.nccl and not choice.nccl:
            continue
        path = source / change.path
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        matches = [number for number, line in enumerate(lines) if change.old in line]
        if len(matches) != 1:
            raise TfdistError(
                f"The source of Horovod {VERSION} is not as it was released: {change.path} has "
                f"{change.old!r} {len(matches)} times instead of once. Look at the index that pip "
                "uses."
            )
        lines[matches[0]] = change.new
        path.write_text("".join(lines))


#: Python packages of the build, in the versions that were tried. They go into a directory of the
#: build, not into the user's environment.
_PACKAGES = ("setuptools>=70.1,<85", "packaging")
_CMAKE, _NINJA = "cmake>=3.18,<5", "ninja"
#: Memory that one run of the compiler may take.
_BYTES_A_JOB = 1536 << 20
_HINT = "If there is another C++ compiler, name it in CXX and run this again."


@dataclasses.dataclass(frozen=True)
class Workshop:
    """The directories and tools with which a wheel is built.

    Attributes:
        folder: a temporary directory.
        tools: the tools of the machine.
        commands: runs the build's commands.
        progress: called with the progress.
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
    shop.progress.phase(f"downloading the source of Horovod {VERSION}")
    archive = download(shop.commands, shop.folder, changes)
    tree = unpack(archive, shop.folder / "source")
    patch(tree, choice)
    shop.progress.phase(f"compiling with {_jobs()} job{'s' if _jobs() > 1 else ''}")
    out = shop.folder / "wheel"
    shop.commands.run(
        f"The compilation of Horovod {VERSION}",
        # Quiet: else it gives the build tool an option that ninja does not know.
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(out)],
        changes={**changes, "HOROVOD_LOCAL_VERSION": MARK},
        folder=tree,
        each=percentages(shop.progress),
        hint=_HINT,
    )
    return next(out.glob("*.whl"))


def _get_packages(shop: Workshop) -> None:
    wanted = [*_PACKAGES, *([] if shop.tools.cmake else [_CMAKE])]
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
    """The changes to the environment of the build's commands."""
    environ = environment.snapshot()
    unset: dict[str, str | None] = {
        name: None for name in environ if name.startswith("HOROVOD_") and name not in KEPT_VARIABLES
    }
    # Variables that `make test` would hand down to the make of the build.
    unset |= dict.fromkeys(("MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"))
    folders = (str(shop.packages / "bin"), environ.get("PATH", ""))
    jobs = str(_jobs())
    # Leaves out what only a debugger reads: nine tenths of the library.
    strip = " -Wl,--strip-debug" if sys.platform.startswith("linux") else ""
    return {
        **unset,
        **choice.variables(),
        **(_cuda(environ) if choice.nccl else {}),
        "PATH": os.pathsep.join(folders),
        "PYTHONPATH": str(shop.packages),
        "CXX": shop.tools.compiler,
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        # CMake 4 refuses the age that third-party parts of the source ask for.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_CMAKE": shop.tools.cmake or str(shop.packages / "bin" / "cmake"),
        "CMAKE_GENERATOR": "Unix Makefiles" if shop.tools.make else "Ninja",
        "LDFLAGS": f"{environ.get('LDFLAGS', '')}{strip}".strip(),
    }


def _cuda(environ: Mapping[str, str]) -> dict[str, str]:
    """The directory of CUDA; left to itself the build may find an nvcc that lies elsewhere."""
    nvcc = find_nvcc(environ)
    home = nvcc.resolve().parent.parent if nvcc else None
    if home is None or not (home / "include" / "cuda_runtime.h").is_file():
        return {}
    return {"HOROVOD_CUDA_HOME": str(home), "CUDAToolkit_ROOT": str(home)}


def _jobs() -> int:
    """The number of files compiled at a time."""
    wanted = environment.snapshot().get("CMAKE_BUILD_PARALLEL_LEVEL", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return max(1, min(cpu_count(), memory() // _BYTES_A_JOB))
