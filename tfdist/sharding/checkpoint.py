"""Sharded checkpoints: directories to which each process has written its part of the variables.

An index, `index.json`, lists for each variable the files that have its regions. It names the files
of one save, whose names have its id, and is replaced when they are all on the disk: until then it
names those of the save before. Files are HDF5 with checksums. No TensorFlow is needed to read them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shutil
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import h5py
import ml_dtypes
import msgspec
import numpy as np

from tfdist.errors import TfdistError
from tfdist.sharding.layout import Region
from tfdist.types import Array
from tfdist.utils.atomic_io import replacing, sync_directory
from tfdist.utils.hdf5 import CarefulFile

__all__ = [
    "Checkpoint",
    "Entry",
    "Index",
    "LoadError",
    "Saved",
    "Slice",
    "assets_of",
    "chief_file",
    "file_of",
    "is_checkpoint",
    "new_file",
    "publish",
    "put",
]

_FORMAT, _VERSION = "tfdist sharded checkpoint", 1

_INDEX, _CONFIG = "index.json", "config.json"

#: Names of files of a save; the id of the save comes before the ending.
_OWN = re.compile(r"(part-\d+|assets)\.(?P<save>[0-9a-f]+)(\.h5)?")

#: The attribute of a file that has the id of its save, and Keras's of a dataset.
_SAVE, _DTYPE = "save", "dtype"


class LoadError(TfdistError, OSError):
    """A checkpoint cannot be read: it is incomplete or damaged."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """A region of a variable, and the file that has it.

    Attributes:
        file: its name in the directory.
        region: the elements of the whole variable.
    """

    file: str
    region: Region


@dataclasses.dataclass(frozen=True)
class Entry:
    """A variable in the index.

    Attributes:
        name: the variable's own path in the model, such as "dense/kernel".
        shape: the whole one's.
        dtype: of its elements.
        layout: how it was divided, such as "- model"; without meaning to a reader.
        slices: they have each element once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    slices: tuple[Slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """The index of a checkpoint.

    Attributes:
        save: the id of the save.
        mesh: the processes that saved, for people.
        files: the bytes of each file.
        groups: the names of layers and the like by their places in a Keras weights file.
        variables: by their places in a Keras weights file, such as "layers/dense/vars/0".
        config: Keras's serialized model and metadata; None if weights were saved only.
        format, version: of the directory.
    """

    save: str
    mesh: str
    files: dict[str, int]
    groups: dict[str, str]
    variables: dict[str, Entry]
    config: tuple[str, str] | None = None
    format: str = _FORMAT
    version: int = _VERSION


def is_checkpoint(path: object) -> bool:
    """Whether a path is the directory of a sharded checkpoint."""
    return isinstance(path, (str, os.PathLike)) and os.path.isfile(os.path.join(path, _INDEX))


def file_of(save: str, rank: int) -> str:
    """The name of the file that a process writes."""
    return f"part-{rank:05}.{save}.h5"


def assets_of(save: str) -> str:
    """The name of the directory of a model's assets, such as vocabularies."""
    return f"assets.{save}"


def chief_file(directory: str) -> str:
    """The path of the file of the process that also wrote what belongs to no variable."""
    with Checkpoint(directory) as saved:
        return os.path.join(directory, file_of(saved.index.save, 0))


# Writing.


@contextlib.contextmanager
def new_file(directory: str, save: str, rank: int) -> Iterator[h5py.File]:
    """A process's file to write to, an `h5py.File`. It is on the disk when the block has ended."""
    path = os.path.join(directory, file_of(save, rank))
    with CarefulFile(path) as file:
        file.attrs[_SAVE] = save
        yield file
    sync_directory(directory)


def put(file: h5py.File, path: str, value: Array, *, checked: bool = True) -> None:
    """Writes an array to a file.

    Args:
        file: an `h5py.File`.
        path: the variable's place in a Keras weights file.
        value: the array.
        checked: whether it gets checksums.
    """
    # Checksums are of chunks, which an array without elements or dimensions has not.
    chunked = {"fletcher32": True} if checked and value.ndim and value.size else {}
    dataset = file.create_dataset(path, data=value, **chunked)
    if value.dtype == ml_dtypes.bfloat16:
        dataset.attrs[_DTYPE] = "bfloat16"


def publish(directory: str, index: Index) -> None:
    """Makes the files of a save the checkpoint, and removes those of earlier saves.

    Raises:
        OSError: if a file is not there as its process has written it.
    """
    for name, size in index.files.items():
        path = os.path.join(directory, name)
        actual = os.path.getsize(path) if os.path.isfile(path) else None
        if actual != size:
            raise OSError(
                f"{name}, which another process has written, is "
                f"{'not there' if actual is None else f'{actual} instead of {size} bytes'}. Name a "
                "directory that all processes share"
            )
    sync_directory(directory)
    if index.config is not None:  # By this file Keras's `load_model` knows a model's directory.
        _replace(os.path.join(directory, _CONFIG), index.config[0].encode())
    _replace(os.path.join(directory, _INDEX), msgspec.json.encode(index))
    if index.config is None:
        _remove(os.path.join(directory, _CONFIG))
    for name in os.listdir(directory):
        match = _OWN.fullmatch(name)
        if match and match["save"] != index.save:
            _remove(os.path.join(directory, name))


def _replace(path: str, data: bytes) -> None:
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(data)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# Reading.


class Saved:
    """A saved variable, of which regions can be read. To NumPy it is the whole array.

    Args:
        checkpoint: the open checkpoint.
        path: its place in a Keras weights file.
    """

    def __init__(self, checkpoint: Checkpoint, path: str) -> None:
        self._checkpoint, self._path = checkpoint, path
        self.entry = checkpoint.index.variables[path]
        self.shape, self.dtype = self.entry.shape, np.dtype(self.entry.dtype)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def read(self, region: Region | None = None) -> Array:
        """The elements of a region, by default all.

        Raises:
            LoadError: if a file is damaged.
        """
        region = region or Region.whole(self.shape)
        values = np.empty(region.shape, self.dtype)
        for each in self.entry.slices:
            common = each.region.overlap(region)
            if common is not None:
                values[common.within(region)] = self.part(each, common)
        return values

    def part(self, of: Slice, region: Region | None = None) -> Array:
        """The elements that one file has, or a region of them.

        Raises:
            LoadError: if the file is damaged.
        """
        region = region or of.region
        with self._checkpoint.reading(of.file) as file:
            dataset = file[self._path]
            if dataset.shape != of.region.shape or dataset.dtype.itemsize != self.dtype.itemsize:
                raise ValueError(f"{self._path} has another shape or type there")
            values = np.asarray(dataset[region.within(of.region)])
        return values if values.dtype == self.dtype else values.view(self.dtype)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        del copy  # It is a copy always.
        return self.read().astype(dtype or self.dtype, copy=False)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Array:
        elements: Array = self.read()[key]
        return elements


class Checkpoint:
    """A sharded checkpoint to read from, whose files are opened when they are needed.

    Args:
        directory: its path.

    Raises:
        LoadError: if it is not complete.
    """

    def __init__(self, directory: str) -> None:
        self.directory = os.fspath(directory)
        self._files: dict[str, h5py.File] = {}
        self.index = self._read_index()
        self._check_files()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()

    def saved(self, path: str) -> Saved:
        """The variable of a place in a Keras weights file."""
        return Saved(self, path)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[h5py.File]:
        """The open file of a name; errors in the block are those of a damaged file."""
        path = os.path.join(self.directory, name)
        try:
            if name not in self._files:
                self._files[name] = h5py.File(path, "r")
                save = self._files[name].attrs.get(_SAVE)
                if save != self.index.save:
                    raise ValueError(f"it belongs to the save {save}, not {self.index.save}")
            yield self._files[name]
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise self._error(f"{name} is damaged ({error})") from error

    @property
    def assets(self) -> str | None:
        """The directory of the model's assets, if it has any."""
        path = os.path.join(self.directory, assets_of(self.index.save))
        return path if os.path.isdir(path) else None

    def _error(self, problem: str) -> LoadError:
        return LoadError(
            f"Cannot load the sharded checkpoint {self.directory!r}: {problem}. Restore the "
            "directory as it was written, or load another checkpoint."
        )

    def _read_index(self) -> Index:
        try:
            with open(os.path.join(self.directory, _INDEX), "rb") as file:
                index = msgspec.json.decode(file.read(), type=Index)
            if (index.format, index.version) != (_FORMAT, _VERSION):
                raise ValueError(f"it is of the format {index.format!r}, version {index.version}")
            for path, entry in index.variables.items():
                _check_entry(path, entry)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._error(f"there is no {_INDEX}, which is written last") from error
        except (ValueError, TypeError, msgspec.MsgspecError) as error:  # 0.18: not a ValueError.
            raise self._error(f"{_INDEX} is damaged ({error})") from error
        return index

    def _check_files(self) -> None:
        """Looks at the sizes of all files before anything is read."""
        for name, size in self.index.files.items():
            path = os.path.join(self.directory, name)
            if os.path.basename(name) != name or not os.path.isfile(path):
                raise self._error(f"{name} is missing")
            if os.path.getsize(path) != size:
                raise self._error(
                    f"{name} has {os.path.getsize(path)} bytes, and was written with {size}"
                )
        named = {each.file for entry in self.index.variables.values() for each in entry.slices}
        if named - {*self.index.files}:
            raise self._error(f"{min(named - {*self.index.files})} is missing in {_INDEX}")


def _check_entry(path: str, entry: Entry) -> None:
    """Checks that the slices of a variable have each element once."""
    np.dtype(entry.dtype)
    regions = [each.region for each in entry.slices]
    inside = all(
        len(each.start) == len(each.shape) == len(entry.shape)
        and min(each.start, default=0) >= 0
        and min(each.shape, default=0) >= 0
        and all(stop <= size for stop, size in zip(each.stop, entry.shape, strict=True))
        for each in regions
    )
    if not inside or sum(each.size for each in regions) != math.prod(entry.shape):
        raise ValueError(f"it does not name a file for each element of {path}")
    for i, each in enumerate(regions):
        if any(each.overlap(other) for other in regions[:i]):
            raise ValueError(f"it names two files for elements of {path}")
