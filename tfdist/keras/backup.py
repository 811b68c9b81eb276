"""BackupAndRestore under a strategy: resumes at the right epoch and step on every worker.

Stock Keras has every worker write the same two files one after the other: the weights, then the
epoch. Workers collide, and a kill between the two files pairs new weights with the old epoch. Here
the epoch and the step are written into the weights file itself, which is replaced in one step. The
second file is still written, for Keras's own readers.

An epoch that was interrupted goes on after the batches that the backup has seen, and its metrics
with it; stock Keras starts it over with the later weights.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h5py
import tensorflow as tf

from tfdist import types
from tfdist._keras import BackupAndRestore, EpochIterator, TFEpochIterator, file_utils, tree
from tfdist.comm import host_collectives
from tfdist.comm.batch_sharding import Slice
from tfdist.errors import ConfigError
from tfdist.keras import saving, sharded_files
from tfdist.keras.hooks import Hook
from tfdist.sharding import checkpoint
from tfdist.types import Backup, Logs, Model, Strategy
from tfdist.utils.atomic_io import replacing, set_aside
from tfdist.utils.hdf5 import finishing

#: The places of the state of training, and of an unfinished epoch's metrics, in the weights file.
_STATE, _METRICS = "training_metadata", "training_metrics"

_local = threading.local()


def hooks() -> list[Hook]:
    """The seams of the callback, and of the loop over an epoch's batches."""
    return [
        Hook(BackupAndRestore, "on_train_begin", _restore_together),
        Hook(BackupAndRestore, "on_epoch_begin", _continue_metrics),
        Hook(BackupAndRestore, "_save_model", _save_together),
        Hook(BackupAndRestore, "on_train_end", _end_together),
        Hook(TFEpochIterator, "__init__", _remember),
        Hook(EpochIterator, "_enumerate_iterator", _skip_done, priority=1),
    ]


def _restore_together(original: Callable[..., None]) -> Callable[..., None]:
    """Each worker would decide by itself whether a backup is there."""
    del original  # it decides on each worker alone

    @functools.wraps(BackupAndRestore.on_train_begin)
    def on_train_begin(self: Backup, logs: Logs | None = None) -> None:
        del logs
        if not _backup_is_there(self):
            return
        iterator = current_iterator()
        build(self.model, iterator)
        _load(self)
        state = host_collectives.on_chief(
            _strategy(), lambda: _read_state(self), "the backup's epoch"
        )
        self.model._initial_epoch = self._current_epoch = state["epoch"]
        done = state.get("steps", 0)
        if done and iterator is not None:
            self._last_batch_seen = done - 1
            iterator._tfdist_skip = done
            self._tfdist_metrics = _saved_metrics(self)

    return on_train_begin


def _continue_metrics(original: Callable[..., None]) -> Callable[..., None]:
    """Puts back the metrics of an interrupted epoch, which Keras resets when it starts."""

    @functools.wraps(original)
    def on_epoch_begin(self: Backup, epoch: int, logs: Logs | None = None) -> None:
        for variable, value in self.__dict__.pop("_tfdist_metrics", ()):
            variable.assign(value)
        original(self, epoch, logs)

    return on_epoch_begin


def _save_together(original: Callable[..., None]) -> Callable[..., None]:
    """All workers would write the same files, and a killed one a part of them."""

    @functools.wraps(original)
    def save_model(self: Backup) -> None:
        state = _state(self)
        # Keras does not save the metrics of `compile`. Reading them takes all workers.
        metrics = _metric_values(self.model) if state["steps"] else []
        if sharded_files.is_for(self._weights_path):
            _write_parts(self, state, metrics)
            return

        def write() -> None:
            if file_utils.is_remote_path(self.backup_dir):
                original(self)
            else:
                _write(self, state, metrics)

        saving.write_once(self.model, self._weights_path, write)

    return save_model


def _end_together(original: Callable[..., None]) -> Callable[..., None]:
    """Deletes the backup once all workers have finished."""

    @functools.wraps(original)
    def on_train_end(self: Backup, logs: Logs | None = None) -> None:
        strategy = _strategy()
        host_collectives.barrier(strategy, "the end of training with a backup")
        host_collectives.on_chief(strategy, lambda: original(self, logs), "deleting the backup")
        self.model._initial_epoch = None  # else the next fit would start at this one's epoch

    return on_train_end


def _strategy() -> Strategy:
    return tf.distribute.get_strategy()


def _backup_is_there(callback: Backup) -> bool:
    """Whether there is a backup, on which all workers must agree."""
    exists = sharded_files.exists(callback._weights_path)
    seen = host_collectives.all_gather_json(_strategy(), exists, "looking for a backup")
    if any(seen) and not all(seen):
        missing = [worker for worker, there in enumerate(seen) if not there]
        raise ConfigError(
            f"BackupAndRestore(backup_dir={str(callback.backup_dir)!r}): worker {seen.index(True)} "
            f"sees a backup there, but workers {missing} do not. Name a directory that all workers "
            "share."
        )
    return any(seen)


def _load(callback: Backup) -> None:
    """Loads the backup on every worker; the one before, if the last one cannot be read."""
    strategy, path = _strategy(), callback._weights_path

    def load() -> None:
        callback.model.load_weights(path)

    def fall_back() -> bool:
        if not sharded_files.exists(callback._prev_weights_path):
            return False
        _copy(callback._prev_weights_path, path)
        if file_utils.exists(callback._prev_training_metadata_path):
            _copy(callback._prev_training_metadata_path, callback._training_metadata_path)
        return True

    try:
        host_collectives.together(strategy, load, "loading the backup")
    except OSError as error:
        if not host_collectives.on_chief(strategy, fall_back, "loading the backup before"):
            raise
        warnings.warn(f"The last backup cannot be read ({error}); the one before is used.")
        host_collectives.together(strategy, load, "loading the backup before")


def _write(callback: Backup, state: dict[str, int], metrics: Sequence[object]) -> None:
    """Writes weights and state in one file; a copy of the last one first, if asked for."""

    def write_weights(path: str) -> None:
        with finishing(_adding(state, metrics)):
            type(callback.model).save_weights(callback.model, path, overwrite=True)

    _keep_last(callback)
    if os.path.isdir(callback._weights_path):
        set_aside(callback._weights_path)
    saving.replace_file(callback._weights_path, write_weights)
    _write_state(callback, state)


def _write_parts(callback: Backup, state: dict[str, int], metrics: Sequence[object]) -> None:
    """The same as a sharded checkpoint, with the state in the chief's file. On all workers."""
    strategy = _strategy()
    host_collectives.on_chief(strategy, lambda: _keep_last(callback), "keeping the last backup")
    chief = host_collectives.rank(strategy) == 0
    with finishing(_adding(state, metrics)) if chief else contextlib.nullcontext():
        sharded_files.save_weights(callback.model, callback._weights_path)
    host_collectives.on_chief(
        strategy, lambda: _write_state(callback, state), "describing the backup"
    )


def _adding(state: dict[str, int], metrics: Sequence[object]) -> Callable[[h5py.File], None]:
    def add_state(file: h5py.File) -> None:
        file.attrs[_STATE] = json.dumps(state)
        for i, value in enumerate(metrics):
            file[f"{_METRICS}/{i}"] = value

    return add_state


def _keep_last(callback: Backup) -> None:
    """Copies the last backup, if that is asked for."""
    os.makedirs(callback.backup_dir, exist_ok=True)
    for path, copy in (
        (callback._weights_path, callback._prev_weights_path),
        (callback._training_metadata_path, callback._prev_training_metadata_path),
    ):
        if callback.double_checkpoint and os.path.exists(path):
            _copy(path, copy)


def _write_state(callback: Backup, state: dict[str, int]) -> None:
    def write(path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(state, file)

    saving.replace_file(callback._training_metadata_path, write)


def _copy(path: str, copy: str) -> None:
    if os.path.isdir(copy):  # Files of another save would stay in it.
        shutil.rmtree(copy)
    with replacing(copy) as temporary:
        if os.path.isdir(path):
            shutil.copytree(path, temporary, copy_function=_link)
        else:
            shutil.copyfile(path, temporary)


def _link(path: str, copy: str) -> None:
    """Files of a sharded checkpoint are never changed, so that a second name is a copy."""
    try:
        os.link(path, copy)
    except OSError:
        shutil.copyfile(path, copy)


def _state_file(callback: Backup) -> str:
    """The path of the HDF5 file that has the state of training."""
    path: str = callback._weights_path
    return checkpoint.chief_file(path) if checkpoint.is_checkpoint(path) else path


def _state(callback: Backup) -> dict[str, int]:
    """The position of training: `epoch` and `batch` as Keras writes them, and the epoch's steps."""
    epoch, batch = callback._current_epoch, callback._last_batch_seen
    steps = 0 if callback.save_freq == "epoch" else batch + 1
    return {"epoch": epoch, "batch": batch, "steps": steps}


def _read_state(callback: Backup) -> dict[str, int]:
    state: dict[str, int] = {"epoch": 0}
    with contextlib.suppress(OSError), h5py.File(_state_file(callback), "r") as file:
        if _STATE in file.attrs:
            state.update(json.loads(file.attrs[_STATE]))
            return state
    if file_utils.exists(callback._training_metadata_path):
        with file_utils.File(callback._training_metadata_path, "r") as file:
            state["epoch"] = json.loads(file.read())["epoch"]
    return state


def build(
    model: Model, iterator: types.EpochIterator | None, *, with_optimizer: bool = True
) -> None:
    """Creates the variables that the backup is loaded into: of model, metrics and optimizer."""
    optimizer = model.optimizer
    try:
        # Keras builds it for all trainable weights, and the program's step perhaps for some.
        model.optimizer = optimizer if with_optimizer else None
        _build(model, iterator)
    finally:
        model.optimizer = optimizer


def _build(model: Model, iterator: types.EpochIterator | None) -> None:
    if iterator is not None:
        spec = iterator._distributed_dataset.element_spec
        batch = spec.batch if isinstance(spec, Slice) else spec
        batch = tree.map_structure(_of_one_replica, batch)
        try:
            model._symbolic_build(data_batch=batch)
        except Exception as error:
            if not model.built:
                raise ConfigError(
                    "BackupAndRestore has a backup to load, but the model has no weights yet, and "
                    f"they cannot be made without data ({error}). Build it before `fit`: call "
                    "`model.build(...)`, or the model on one batch."
                ) from error
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _of_one_replica(spec: object) -> object:
    return getattr(spec, "_value_specs", [spec])[0]


def _metric_values(model: Model) -> list[Any]:
    return [tf.convert_to_tensor(v.value).numpy() for v in model.metrics_variables]


def _saved_metrics(callback: Backup) -> list[tuple[Any, Any]]:
    """The metric variables with their values in the backup; none if the metrics are others now."""
    variables = callback.model.metrics_variables
    with contextlib.suppress(OSError), h5py.File(_state_file(callback), "r") as file:
        saved = file.get(_METRICS, {})
        values = [saved[str(i)][()] for i in range(len(saved))]
        if [value.shape for value in values] == [tuple(v.shape) for v in variables]:
            return list(zip(variables, values, strict=True))
        warnings.warn(
            "The backup was made in the middle of an epoch, with other metrics than now. The "
            "metrics of this epoch cover its remaining batches only."
        )
    return []


def _remember(original: Callable[..., None]) -> Callable[..., None]:
    """Keeps at hand the batches that `fit` is about to go through."""

    @functools.wraps(original)
    def init(self: types.EpochIterator, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        _local.iterator = weakref.ref(self)

    return init


def current_iterator() -> types.EpochIterator | None:
    """The batches that the present `fit` goes through, or None."""
    kept = getattr(_local, "iterator", None)
    return None if kept is None else kept()


def _skip_done(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Reads past the epochs and the batches of an interrupted one that have been seen."""

    @functools.wraps(original)
    def enumerate_iterator(self: types.EpochIterator) -> Iterator[Any]:
        for _ in range(self.__dict__.pop("_tfdist_replay", 0)):
            with self.catch_stop_iteration():
                for _, _, batches in original(self):
                    _read_past(batches, self.steps_per_execution)
        skip = self.__dict__.pop("_tfdist_skip", 0)
        for begin, end, batches in original(self):
            if end < skip:
                with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                    _read_past(batches, self.steps_per_execution)
                continue
            yield begin, end, batches

    return enumerate_iterator


def _read_past(batches: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(batches)
