"""Files that are complete or not there: written beside their place, then renamed into it.

A full disk or a kill while a checkpoint is written leaves the one before as it was. A file being
written lies in a hidden sibling directory whose name ends in `.partial`; the next write of the same
file removes the rest that a killed process has left there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator

from tfdist.errors import ConfigError, TfdistError
from tfdist.utils.messages import logger

__all__ = ["SaveError", "check_writable", "replacing", "set_aside", "sync_directory"]

#: After this long what another host left unfinished counts as abandoned.
_ABANDONED_SECONDS = 24 * 3600

#: The system's message, in the middle of HDF5's.
_IN_HDF5 = re.compile(r"errno = (?P<errno>\d+), error message = '(?P<cause>[^']*)'")

_HINTS = {
    errno.ENOSPC: "Make room there",
    errno.EDQUOT: "Make room there",
    errno.EACCES: "Make the directory writable",
    errno.EPERM: "Make the directory writable",
    errno.EROFS: "Make the directory writable",
    errno.EISDIR: "It is a directory: name a file",
}


class SaveError(TfdistError, OSError):
    """A file could not be written. Every worker of the job raises it, whichever was writing."""

    @classmethod
    def of(cls, path: str, error: Exception, hidden: str = "") -> SaveError:
        """The error in words.

        Args:
            path: where the file was to be.
            error: the error that was raised.
            hidden: a temporary path that the message should not show.
        """
        number = getattr(error, "errno", None)
        cause = getattr(error, "strerror", None) or _plain(str(error).replace(hidden or path, path))
        match = _IN_HDF5.search(cause)
        if match:
            number, cause = int(match["errno"]), match["cause"]
        number = number or next((n for n in _HINTS if os.strerror(n) in cause), None)
        hint = _HINTS.get(number or 0, "Look at the disk and the directory")
        made = cls(
            f"Cannot save to {path!r}: {cause}. What was there before is unchanged. {hint}, or "
            "choose another path."
        )
        made.errno = number
        return made

    @staticmethod
    def covers(error: Exception) -> bool:
        """Whether an error comes from the disk; HDF5 raises some of these as RuntimeError."""
        return isinstance(error, OSError) or _IN_HDF5.search(str(error)) is not None


def _plain(message: str) -> str:
    """A message without TensorFlow's lines about its ops; of these the cause comes last."""
    parts = re.sub(r"\{\{.*?\}\}|\[Op:\w+\]", "", message).split("; ")
    return (parts[-1] if len(parts) > 1 else message).strip()


def check_writable(path: str, subject: str, *, parents: bool = True, hint: str = "") -> None:
    """Finds out before any work whether a file could be written at its end. Leaves nothing behind.

    Args:
        path: the file.
        subject: the option that asks for it, with its value, such as `--timeline step.png`.
        parents: whether missing directories are made when it is written.
        hint: what to do, if that is not to choose another path.

    Raises:
        ConfigError: if it could not.
    """
    target = os.path.realpath(path)
    parent = os.path.dirname(target)
    while parents and not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    try:
        if not path or os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        do = _HINTS.get(error.errno or 0, "Look at the directory")
        what = hint or f"{do}, or choose another path"
        raise ConfigError(f"{subject} cannot be written: {error.strerror}. {what}.") from error


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Gives a temporary path and moves the file written there to `path`.

    A file replaces a file in one step. So does a directory, if the file system can exchange two
    directories and the old one holds nothing of another origin; else its entries are replaced one
    by one. Several files whose names begin alike, as those of sharded weights, follow each other,
    the index (`.json`) last; while they do there is no index, rather than one of two generations.

    Args:
        path: file or directory; missing parents are made, so that a long training does not end in
            an error about them. A symbolic link is followed.

    Yields:
        A path with the same last component. On an error nothing of it remains.
    """
    parent, name = os.path.split(os.path.realpath(path))
    os.makedirs(parent, exist_ok=True)
    _sweep(parent, name)
    partial = os.path.join(parent, f".{name}.{socket.gethostname()}-{os.getpid()}.partial")
    os.mkdir(partial)
    try:
        yield os.path.join(partial, name)
        sync_directory(partial)
        _publish(partial, parent)
    finally:
        _discard(partial)


def set_aside(path: str) -> None:
    """Renames a file or directory whose place is needed for the other kind."""
    aside = f"{path}.before"
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = f"{path}.before{number}"
    os.rename(path, aside)
    kind = "directory" if os.path.isdir(aside) else "file"
    logger.warning(f"{path!r} was a {kind}, in whose place another kind is saved: it is {aside!r}.")


def _discard(directory: str) -> None:
    """Removes a directory and frees its space, even of files that HDF5 could not close."""
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                os.truncate(os.path.join(root, name), 0)
    shutil.rmtree(directory, ignore_errors=True)


def _sweep(parent: str, name: str) -> None:
    """Removes files of the same name that killed processes have left."""
    pattern = re.compile(rf"\.{re.escape(name)}\.(?P<host>.+)-(?P<pid>\d+)\.partial")
    for entry in os.listdir(parent):
        match = pattern.fullmatch(entry)
        path = os.path.join(parent, entry)
        if match and _abandoned(path, match["host"], int(match["pid"])):
            shutil.rmtree(path, ignore_errors=True)


def _abandoned(path: str, host: str, pid: int) -> bool:
    if host == socket.gethostname():
        return pid == os.getpid() or not _alive(pid)
    with contextlib.suppress(OSError):
        return time.time() - os.stat(path).st_mtime > _ABANDONED_SECONDS
    return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sync_directory(directory: str) -> None:
    """Waits until a directory and all files in it are on the disk.

    Some full disks report errors only then.
    """
    for root, _, names in os.walk(directory):
        for name in [*names, "."]:
            descriptor = os.open(os.path.join(root, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _publish(partial: str, parent: str) -> None:
    entries = sorted(os.listdir(partial), key=lambda name: (name.endswith(".json"), name))
    if len(entries) > 1:
        for name in entries:
            if name.endswith(".json"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(parent, name))
    for name in entries:
        _move(os.path.join(partial, name), os.path.join(parent, name))


def _move(new: str, old: str) -> None:
    if not (os.path.isdir(new) and os.path.isdir(old)):
        os.replace(new, old)
        return
    foreign = set(os.listdir(old)) - set(os.listdir(new))
    if not foreign and _exchange(new, old):
        return
    for name in sorted(os.listdir(new)):
        _move(os.path.join(new, name), os.path.join(old, name))


def _exchange(one: str, other: str) -> bool:
    """Exchanges two directories in one step; False if that is not possible."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)
