"""Horovod's source: downloaded by name, unpacked, and changed where it does not compile."""

from __future__ import annotations

import dataclasses
import sys
import tarfile
from pathlib import Path

from tfdist.errors import TfdistError
from tfdist.horovod_build.choice import Choice
from tfdist.horovod_build.commands import PIP_HINT, Commands

__all__ = ["MARK", "VERSION", "download", "patch", "unpack"]

#: The release that is built: the last one.
VERSION = "0.28.1"

#: Marks what was built from the changed source: a part of the version that pip shows.
MARK = "tfdist2"


@dataclasses.dataclass(frozen=True)
class _Change:
    """A line of the source that is replaced.

    Attributes:
        path: the file.
        old: what only that line contains.
        new: what is there instead.
        nccl: whether it is needed for GPUs only.
    """

    path: str
    old: str
    new: str
    nccl: bool = False


_CHANGES = (
    # Registers Horovod's operations with XLA; includes a header that TensorFlow no longer ships.
    # Without it Horovod's operations run outside of what XLA compiles.
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
    # A function that TensorFlow no longer exports, replaced by what it did. A template, since the
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
    """Gets the released source from the index that pip is configured for.

    Args:
        commands: runs pip.
        folder: where the archive goes.
        changes: to the environment, so that pip finds setuptools: it asks the source for its name.
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
        if choice.nccl or not change.nccl:
            _apply(change, source / change.path)


def _apply(change: _Change, path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    found = [number for number, line in enumerate(lines) if change.old in line]
    if len(found) != 1:
        raise TfdistError(
            f"The source of Horovod {VERSION} is not as it was released: {change.path} has "
            f"{change.old!r} {len(found)} times instead of once. Look at the index that pip uses."
        )
    lines[found[0]] = change.new
    path.write_text("".join(lines))
