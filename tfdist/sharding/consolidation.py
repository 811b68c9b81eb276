"""Consolidation: a sharded checkpoint as an ordinary file of Keras, on one process.

One part of one variable is in memory at a time. No TensorFlow is needed.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from typing import NamedTuple

import h5py
import ml_dtypes
import numpy as np

from tfdist.errors import ConfigError
from tfdist.sharding.checkpoint import Checkpoint, Saved, chief_file, is_checkpoint, put
from tfdist.utils.atomic_io import SaveError, replacing
from tfdist.utils.hdf5 import CarefulFile

__all__ = ["Written", "consolidate"]

_MODEL, _WEIGHTS = ".keras", ".weights.h5"


class Written(NamedTuple):
    """A file that has been written.

    Attributes:
        variables: the number of its variables.
        files: the number of files that they came from.
        size: its bytes.
    """

    variables: int
    files: int
    size: int


def consolidate(
    directory: str, out: str, note: Callable[[str], None] = lambda text: None
) -> Written:
    """Writes a sharded checkpoint as an ordinary file of Keras, completely or not at all.

    Args:
        directory: the checkpoint.
        out: the file to write: `.weights.h5`, or `.keras` if the whole model was saved.
        note: takes the place of the variable that is being written.

    Raises:
        ConfigError: if there is no checkpoint, or `out` is not such a file.
        LoadError: if a part of the checkpoint is missing or damaged.
        SaveError: if the disk refuses.
    """
    if not is_checkpoint(directory):
        raise ConfigError(
            f"{directory!r} is not a sharded checkpoint: there is no index.json. Name a directory "
            "that a job with --checkpoints sharded has written, of which index.json comes last."
        )
    with Checkpoint(directory) as checkpoint:
        _check_out(checkpoint, out)
        if os.path.isdir(out):
            raise ConfigError(f"OUT {out!r} is a directory. Name a file.")
        hidden = ""
        try:
            with replacing(out) as temporary:
                hidden = temporary
                if out.endswith(_MODEL):
                    _write_model(checkpoint, temporary, note)
                else:
                    _write_weights(checkpoint, temporary, note)
        except OSError as error:
            if getattr(error, "exit_status", None) is None and SaveError.covers(error):
                raise SaveError.of(out, error, hidden) from error
            raise
        index = checkpoint.index
        return Written(len(index.variables), len(index.files), os.path.getsize(out))


def _check_out(checkpoint: Checkpoint, out: str) -> None:
    if not out.endswith((_MODEL, _WEIGHTS)):
        raise ConfigError(
            f"OUT {out!r} ends in neither {_WEIGHTS} nor {_MODEL}, the files of Keras. Name one "
            f"of these, such as {os.path.splitext(out)[0] + _WEIGHTS!r}."
        )
    if out.endswith(_MODEL) and checkpoint.index.config is None:
        raise ConfigError(
            f"OUT {out!r} would be a whole model, and {checkpoint.directory!r} has its weights "
            f"only. Name a file that ends in {_WEIGHTS}, and load it into the model."
        )


def _write_model(checkpoint: Checkpoint, path: str, note: Callable[[str], None]) -> None:
    """A zip archive as Keras writes it; nothing in it is compressed."""
    weights = path + ".h5"
    _write_weights(checkpoint, weights, note)
    config, metadata = checkpoint.index.config or ("", "")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", metadata)
        archive.writestr("config.json", config)
        archive.write(weights, "model.weights.h5")
        for root, _, names in os.walk(checkpoint.assets or os.devnull):
            for name in names:
                file = os.path.join(root, name)
                archive.write(file, f"assets/{os.path.relpath(file, checkpoint.assets)}")
    os.unlink(weights)


def _write_weights(checkpoint: Checkpoint, path: str, note: Callable[[str], None]) -> None:
    with CarefulFile(path) as file:
        for group, name in checkpoint.index.groups.items():
            file.require_group(group).attrs["name"] = name
        for variable in checkpoint.index.variables:
            note(variable)
            _copy(checkpoint.saved(variable), file, variable)
        _copy_the_rest(checkpoint, file)


def _copy(saved: Saved, file: h5py.File, path: str) -> None:
    """Copies a variable, one part after the other."""
    slices = saved.entry.slices
    if len(slices) == 1:
        put(file, path, saved.part(slices[0]), checked=False)
        return
    # To HDF5 types that NumPy does not have itself are bytes without a meaning.
    plain = saved.dtype.kind != "V"
    stored = saved.dtype if plain else np.dtype(f"V{saved.dtype.itemsize}")
    dataset = file.create_dataset(path, saved.shape, stored)
    if saved.dtype == ml_dtypes.bfloat16:
        dataset.attrs["dtype"] = "bfloat16"
    for each in slices:
        values = saved.part(each)
        dataset[each.region.within(each.region.whole(saved.shape))] = (
            values if plain else values.view(stored)
        )


def _copy_the_rest(checkpoint: Checkpoint, file: h5py.File) -> None:
    """Copies a callback's own values in the chief's file, such as the epoch."""
    name = os.path.basename(chief_file(checkpoint.directory))
    with checkpoint.reading(name) as part:
        file.attrs.update({key: value for key, value in part.attrs.items() if key != "save"})
        for key in part:
            if key not in file:
                part.copy(key, file)
