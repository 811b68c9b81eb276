"""The requirements of a build, checked before any download; all missing ones are reported."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tfdist import environment
from tfdist.cluster.validation.machine import installed_version
from tfdist.errors import ConfigError

__all__ = [
    "GPU_CHOICES",
    "KEPT_VARIABLES",
    "Choice",
    "Tools",
    "check",
    "chosen",
    "find_nccl",
    "find_nvcc",
    "tensorflow_version",
]


# The features of a Horovod to build, and the other inputs that decide about the result.

#: The values of `--gpu`.
GPU_CHOICES: dict[str, str] = {
    "auto": "NCCL where nvcc and NCCL's header are found",
    "nccl": "NCCL",
    "none": "no GPU operations",
}

#: Horovod's own variables that name locations; all others are set for the build.
KEPT_VARIABLES = (
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NCCL_LINK",
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The features that Horovod is built with, besides Gloo.

    Attributes:
        mpi: its operations and start by MPI.
        nccl: GPU operations by NCCL.
    """

    mpi: bool = False
    nccl: bool = False

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of all libraries that exchange tensors."""
        return ("Gloo", *(["MPI"] if self.mpi else []), *(["NCCL"] if self.nccl else []))

    def variables(self) -> dict[str, str]:
        """The variables that configure Horovod's build."""
        return {
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_CPU_OPERATIONS": "GLOO",
            "HOROVOD_WITH_MPI" if self.mpi else "HOROVOD_WITHOUT_MPI": "1",
            **({"HOROVOD_GPU_OPERATIONS": "NCCL"} if self.nccl else {}),
        }


def chosen(mpi: bool, gpu: str, environ: Mapping[str, str] | None = None) -> Choice:
    """The choice that the options of the command stand for.

    Args:
        mpi: whether MPI was asked for.
        gpu: a key of `GPU_CHOICES`.
        environ: environment variables; by default the process's own.
    """
    variables = environment.snapshot() if environ is None else environ
    result = gpu == "auto" and bool(find_nvcc(variables) and find_nccl(variables))
    return Choice(mpi=mpi, nccl=gpu == "nccl" or result)


def find_nvcc(environ: Mapping[str, str]) -> Path | None:
    """NVIDIA's compiler, where Horovod's build looks for it."""
    folders = [Path(part) for part in environ.get("PATH", "").split(":") if part]
    return _first_file("nvcc", [_cuda_home(environ) / "bin", *folders])


def find_nccl(environ: Mapping[str, str]) -> Path | None:
    """NCCL's header, where Horovod's build looks for it."""
    return _first_file("nccl.h", _includes(environ))


def _first_file(name: str, folders: Iterable[Path]) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _cuda_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOROVOD_CUDA_HOME") or "/usr/local/cuda")


def _includes(environ: Mapping[str, str]) -> Iterator[Path]:
    if named := environ.get("HOROVOD_NCCL_INCLUDE"):
        yield Path(named)
    if home := environ.get("HOROVOD_NCCL_HOME"):
        yield Path(home) / "include"
    yield _cuda_home(environ) / "include"
    yield from (Path("/usr/include"), Path("/usr/local/include"))


#: Bytes that a build needs in the temporary directory, and that its result needs elsewhere.
BUILD_BYTES, WHEEL_BYTES = 600 << 20, 50 << 20
_MIB = 1 << 20
_OLDEST_CMAKE = (3, 13)
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 60.0
_CPP17 = """
#include <optional>
#include <string_view>
#if __cplusplus < 201703L
#error "not C++17"
#endif
int main() { return static_cast<int>(std::optional<std::string_view>("").value().size()); }
"""
_MPI = """
#include <mpi.h>
int main(int argc, char** argv) { return MPI_Init(&argc, &argv); }
"""


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools that were found to build with.

    Attributes:
        compiler: the command of the C++ compiler.
        cmake: CMake, or None if pip must get it.
        make: whether there is a make; if not, pip must get ninja.
    """

    compiler: str
    cmake: str | None
    make: bool


def tensorflow_version() -> str:
    """The version of the installed TensorFlow.

    Raises:
        ConfigError: if there is none.
    """
    version = installed_version("tensorflow")
    if version is None:
        raise ConfigError(
            "TensorFlow is not installed in this Python environment, and Horovod is built against "
            "it. Install it first: pip install tensorflow"
        )
    return version


def check(choice: Choice, directories: Mapping[str, tuple[Path, int]]) -> Tools:
    """Looks for all that the build needs.

    Args:
        choice: the features to build.
        directories: the use of each directory that is written to, and the bytes it needs.

    Raises:
        ConfigError: if something is missing; the message lists it all.
    """
    environ = environment.snapshot()
    missing: list[str] = []
    compiler = _find_compiler(environ, missing)
    missing += [*_missing_libraries(choice, environ), *_missing_room(directories)]
    if missing:
        count = "1 thing is" if len(missing) == 1 else f"{len(missing)} things are"
        lines = "\n".join(f"  - {each}" for each in missing)
        raise ConfigError(f"Horovod cannot be built here: {count} missing.\n{lines}")
    return Tools(compiler, _find_cmake(environ), shutil.which("make") is not None)


def _find_compiler(environ: Mapping[str, str], missing: list[str]) -> str:
    """The first compiler that knows C++17; adds to what is missing if there is none."""
    named = environ.get("CXX")
    commands = [shlex.split(named)] if named else [[name] for name in _COMPILERS]
    problems = {}
    for command in commands:
        if command and shutil.which(command[0]):
            problem = _compile(command, _CPP17)
            if problem is None:
                return shlex.join(command)
            problems[shlex.join(command)] = problem
    looked = f"CXX={named!r} is not" if named else f"none of {', '.join(_COMPILERS)} is"
    detail = f"{looked} in PATH"
    if problems:
        first, problem = next(iter(problems.items()))
        detail = f"{first} cannot compile it ({problem})"
    missing.append(
        f"A C++17 compiler: {detail}. Install one, with its standard library: apt install g++, or "
        "dnf install gcc-c++."
    )
    return ""


def _compile(compiler: list[str], text: str) -> str | None:
    """The reason why a compiler cannot make a program, or None."""
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        source = Path(folder, "check.cc")
        source.write_text(text)
        command = [*compiler, "-std=c++17", str(source), "-o", str(source.with_suffix(""))]
        done = _run(command)
    if done is None:
        return "it does not start"
    lines = [line for line in done.stdout.splitlines() if "error" in line] or ["it fails"]
    return None if done.returncode == 0 else lines[0].replace(f"{source}:", "").strip()


def _find_cmake(environ: Mapping[str, str]) -> str | None:
    """A CMake that is new enough, or None."""
    path = shutil.which("cmake", path=environ.get("PATH"))
    done = _run([path, "--version"]) if path else None
    version = re.search(r"version (\d+)\.(\d+)", done.stdout) if done else None
    if version is None or (int(version[1]), int(version[2])) < _OLDEST_CMAKE:
        return None
    return path


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _missing_libraries(choice: Choice, environ: Mapping[str, str]) -> Iterator[str]:
    if importlib.util.find_spec("pip") is None:
        yield "pip, in this Python environment. Install it: python -m ensurepip"
    if choice.mpi:
        problem = "mpicxx is not in PATH"
        if shutil.which("mpicxx"):
            failure = _compile(["mpicxx"], _MPI)  # Some packages lack its headers.
            problem = f"mpicxx does not work ({failure})" if failure else ""
        if problem:
            yield (
                f"MPI, which --mpi asks for: {problem}. Install Open MPI (apt install "
                "libopenmpi-dev), or leave --mpi out."
            )
    if choice.nccl and find_nvcc(environ) is None:
        yield (
            "CUDA, which --gpu nccl asks for: nvcc is not in PATH. Install the CUDA toolkit, set "
            "HOROVOD_CUDA_HOME, or choose --gpu none."
        )
    if choice.nccl and find_nccl(environ) is None:
        yield (
            "NCCL, which --gpu nccl asks for: nccl.h was not found. Install libnccl-dev, set "
            "HOROVOD_NCCL_HOME to the directory that has include/nccl.h, or choose --gpu none."
        )


def _missing_room(directories: Mapping[str, tuple[Path, int]]) -> Iterator[str]:
    for purpose, (path, wanted) in directories.items():
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        free = shutil.disk_usage(there).free
        if free < wanted:
            yield (
                f"Room for {purpose}: {path} has {free // _MIB} MiB free, {wanted // _MIB} MiB are "
                "needed."
            )
