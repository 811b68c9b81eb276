"""What a Horovod is to be built with, and what decides about the result besides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfdist import environment

__all__ = ["GPU_CHOICES", "KEPT_VARIABLES", "Choice", "chosen", "find_nccl", "find_nvcc"]

#: The values of `--gpu`.
GPU_CHOICES: dict[str, str] = {
    "auto": "NCCL where nvcc and NCCL's header are found",
    "nccl": "NCCL",
    "none": "no GPU operations",
}

#: Horovod's own variables that say where things are; all others are set for the build.
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
    """What Horovod is built with, besides Gloo.

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
        """The variables by which Horovod's build is told."""
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
    found = gpu == "auto" and bool(find_nvcc(variables) and find_nccl(variables))
    return Choice(mpi=mpi, nccl=gpu == "nccl" or found)


def find_nvcc(environ: Mapping[str, str]) -> Path | None:
    """NVIDIA's compiler, where Horovod's build looks for it."""
    folders = [Path(part) for part in environ.get("PATH", "").split(":") if part]
    homes = [home / "bin" for home in _cuda_homes(environ)]
    return next((f / "nvcc" for f in (*homes, *folders) if (f / "nvcc").is_file()), None)


def find_nccl(environ: Mapping[str, str]) -> Path | None:
    """NCCL's header, where Horovod's build looks for it."""
    return next((f / "nccl.h" for f in _includes(environ) if (f / "nccl.h").is_file()), None)


def _cuda_homes(environ: Mapping[str, str]) -> list[Path]:
    named = environ.get("HOROVOD_CUDA_HOME")
    return [Path(named)] if named else [Path("/usr/local/cuda")]


def _includes(environ: Mapping[str, str]) -> Iterator[Path]:
    if named := environ.get("HOROVOD_NCCL_INCLUDE"):
        yield Path(named)
    if home := environ.get("HOROVOD_NCCL_HOME"):
        yield Path(home) / "include"
    yield from (home / "include" for home in _cuda_homes(environ))
    yield from (Path("/usr/include"), Path("/usr/local/include"))
