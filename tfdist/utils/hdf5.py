"""HDF5 files on a disk that may fill up.

If a file cannot be written, the HDF5 library keeps it half open, and the process often dies of
a segmentation fault when it is closed; a job then ends without a word about the disk. Here HDF5
writes through a Python object that hides a failure from it: writes after the failure are dropped,
and the error is raised when the file has been closed.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import h5py

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from typing_extensions import Buffer


__all__ = ["CarefulFile", "finishing"]

_local = threading.local()


class CarefulFile(h5py.File):  # type: ignore[misc]
    """An HDF5 file to write to, whose `close` raises the errors of the disk.

    Args:
        path: where it is; a file that is there is overwritten.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._sink = os.fspath(path), _Sink(path)
        super().__init__(self._sink, "w")

    @property
    def filename(self) -> str:
        """The path, as of a file that HDF5 opened itself."""
        return self._path

    def close(self) -> None:
        """Closes the file.

        Raises:
            OSError: if any part of it could not be written.
        """
        if self.id.valid:
            finish = getattr(_local, "finish", None)
            if finish is not None:
                finish(self)
        super().close()
        self._sink.close()
        if self._sink.error is not None:
            raise self._sink.error


@contextmanager
def finishing(finish: Callable[[h5py.File], None]) -> Iterator[None]:
    """In the block, adds something to each HDF5 file that Keras writes, before it is closed.

    Args:
        finish: takes the open file.
    """
    _local.finish = finish
    try:
        yield
    finally:
        _local.finish = None


class _Sink(io.RawIOBase):
    """A file that accepts everything and remembers its first error."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.error: OSError | None = None
        self._file = io.FileIO(path, "w+")

    def write(self, data: Buffer) -> int:
        size = len(memoryview(data))

        def write_all() -> None:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]

        self._attempt(write_all)
        return size

    def truncate(self, size: int | None = None) -> int:
        self._attempt(lambda: self._file.truncate(size))
        return 0 if size is None else size

    def readinto(self, buffer: WriteableBuffer) -> int:
        return self._file.readinto(buffer)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._attempt(self._file.close)
        super().close()

    def _attempt(self, action: Callable[[], Any]) -> None:
        if self.error is None or action == self._file.close:
            try:
                action()
            except OSError as error:
                self.error = self.error or error
