"""Saving a model: one process writes each file, completely or not at all, and all hear how it went.

Metric variables are summed over the replicas when they are read, so a save on the chief alone would
wait for ever. Here all workers first read these variables together; then the chief writes, with the
values at hand and without any communication, so that whatever goes wrong on its disk cannot leave
the others waiting. They write nothing. In the end all meet and share the outcome.

Hooked is what Keras's public functions call inside, so that names imported before the scope was
opened (`from keras.models import save_model`) are covered too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist._keras import TFExportArchive, file_utils, io_utils, legacy_h5_format, saving_lib
from tfdist._keras import keras_export as export
from tfdist._tf.distribute import (
    TrackableSaver,
    eagerly_outside_of_scope,
    is_distributed,
)
from tfdist._tf.graphs import LoadedFunction
from tfdist._tf.variables import SyncOnReadVariable
from tfdist.comm import host_collectives
from tfdist.errors import TfdistError
from tfdist.keras import progress, updating
from tfdist.keras.hooks import Hook
from tfdist.sharding.variables import ShardedVariable, noted, read_together
from tfdist.types import Model, Tensor, Variable
from tfdist.utils.atomic_io import SaveError, replacing
from tfdist.utils.hdf5 import CarefulFile
from tfdist.utils.thread_state import Flag

_local = threading.local()

#: Set while the one process that writes a file writes it.
_writing = Flag()


def writers() -> list[tuple[Any, str]]:
    """Keras's functions that write a model to a file, but for `.h5`: owner and name."""
    return [
        (saving_lib, "save_model"),
        (saving_lib, "save_weights_only"),
        (TFExportArchive, "write_out"),
        (export, "export_onnx"),
        (export, "export_openvino"),
        (export, "export_litert"),
    ]


def hooks() -> list[Hook]:
    """The seams of Keras's writers and their helpers, and of variables that communicate."""
    return [
        *(Hook(owner, name, _by_one_process) for owner, name in writers()),
        Hook(legacy_h5_format, "save_model_to_hdf5", _legacy_by_one_process),
        Hook(TrackableSaver, "save", _apart),
        Hook(saving_lib, "get_attr_skipset", _undistributed),
        Hook(io_utils, "ask_to_proceed_with_overwrite", _chief_answers),
        Hook(io_utils, "print_msg", _name_the_final_path),
        Hook(saving_lib, "_raise_loading_failure", _mistakes_first),
        Hook(SyncOnReadVariable, "_get_cross_replica", _read_from_hand),
        Hook(saving_lib.H5IOStore, "_get_h5_file", _with_care),
        Hook(LoadedFunction, "_call_flat", _by_first_replica),
    ]


def write_once(source: Any, path: object, write: Callable[[], None]) -> None:
    """Runs `write` on the one process whose job it is, and shares its outcome with all.

    That is the chief. A script may name another path on each worker, as TensorFlow's guides do;
    each of these files is then written by the first worker that names it.

    Args:
        source: the model or export archive whose variables `write` reads.
        path: the file to write; anything but a path, such as a buffer, is each worker's own.
        write: writes; must not communicate.

    Raises:
        Exception: on every worker, whatever `write` raised on one.
    """
    strategy = tf.distribute.get_strategy()
    updating.flush(source, batches=False)
    if host_collectives.worker_count(strategy) == 1:
        with eagerly_outside_of_scope(), _writing.up():
            write()
        return
    reads = _reads_of(source)
    asked = {"path": _place(path), "reads": len(reads)}
    answers = host_collectives.all_gather_json(strategy, asked, "saving a model")
    if len({answer["reads"] for answer in answers}) > 1:
        raise SaveError(f"Cannot save to {path!r}: the workers' models differ: {answers}.")
    earlier = [answer["path"] for answer in answers[: strategy.world.worker]]
    own = asked["path"] is None or asked["path"] not in earlier
    with shared_reads(reads, keep=own), eagerly_outside_of_scope(), _writing.up():
        failure = _failure_of(write) if own else None

    def report() -> None:
        if failure is not None:
            raise failure

    host_collectives.together(strategy, report, "the end of saving a model")


def replace_file(path: str | Path, write: Callable[[Any], Any]) -> None:
    """Writes a file or directory completely or not at all.

    Args:
        path: local paths are written beside their place and moved; buffers, remote paths and
            repositories directly.
        write: takes the path to write to.

    Raises:
        SaveError: if the disk refuses.
    """
    if _place(path) is None or file_utils.is_remote_path(path) or str(path).startswith("hf://"):
        write(path)
        return
    final, hidden = str(path), ""
    try:
        with replacing(final) as temporary:
            hidden = temporary
            _local.shown = (temporary, final)
            write(temporary)
        if (noted := progress.current()) is not None:
            noted.wrote(final)
    except Exception as error:
        if isinstance(error, tf.errors.OpError) or SaveError.covers(error):
            raise SaveError.of(final, error, hidden) from error
        raise
    finally:
        _local.shown = None


@contextlib.contextmanager
def shared_reads(variables: list[Any], keep: bool = True) -> Iterator[None]:
    """Reads variables together with the other workers; in the block their values are at hand.

    Args:
        variables: TensorFlow's on-read variables, and Keras's that are divided; the same ones in
            the same order on every worker.
        keep: whether this worker needs the values of those that are divided.
    """
    divided = [each for each in variables if isinstance(each, ShardedVariable)]
    others = [each for each in variables if not isinstance(each, ShardedVariable)]
    values = {id(variable): variable._get_cross_replica() for variable in others}
    before = _at_hand()
    _local.at_hand = {**(before or {}), **values}
    try:
        with read_together(divided, keep):
            yield
    finally:
        _local.at_hand = before


def on_read_variables(variables: Iterable[object]) -> list[Any]:
    """Those of some Keras variables that communicate when they are read."""
    divided = [each for each in variables if isinstance(each, ShardedVariable)]
    values = [getattr(variable, "_value", variable) for variable in variables]
    return [*divided, *(value for value in values if isinstance(value, SyncOnReadVariable))]


def _at_hand() -> dict[int, Any] | None:
    return getattr(_local, "at_hand", None)


def _failure_of(write: Callable[[], None]) -> Exception | None:
    try:
        write()
    except Exception as error:
        return error
    return None


def _place(path: object) -> str | None:
    """A path by which workers recognise that they mean the same file; None for a buffer."""
    if not isinstance(path, (str, os.PathLike)):
        return None
    text = os.fspath(path)
    return text if file_utils.is_remote_path(text) else os.path.abspath(text)


def _by_one_process(original: Callable[..., Any]) -> Callable[..., Any]:
    """One writer for a Keras function that takes a model or archive and a path."""

    @functools.wraps(original)
    def save(source: object, filepath: Any, *args: object, **kwargs: object) -> None:
        def write(place: object) -> object:
            return original(source, place, *args, **kwargs)

        if _writing.is_up:
            write(filepath)
        else:
            write_once(source, filepath, lambda: replace_file(filepath, write))

    return save


def _legacy_by_one_process(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for Keras's function for `.h5` files, which opens its file itself."""

    @functools.wraps(original)
    def save_model_to_hdf5(model: Model, filepath: object, *args: object, **kwargs: object) -> None:
        def write(place: Any) -> None:
            if _place(place) is None:
                original(model, place, *args, **kwargs)
                return
            with CarefulFile(place) as file:
                original(model, file, *args, **kwargs)

        _by_one_process(lambda _, place: write(place))(model, filepath)

    return save_model_to_hdf5


def _with_care(original: Callable[..., Any]) -> Callable[..., Any]:
    """A process that is killed while it writes HDF5 leaves a broken file in place of the former."""

    @functools.wraps(original)
    def get_h5_file(self: Any, path_or_io: Any, mode: str | None = None) -> object:
        on_disk = isinstance(path_or_io, Path) and not self.archive
        if on_disk and (mode or self.mode) == "w":
            return CarefulFile(path_or_io)
        return original(self, path_or_io, mode)

    return get_h5_file


def _chief_answers(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Only the chief's user is asked whether a file may be replaced."""

    @functools.wraps(original)
    def ask(filepath: object) -> bool:
        strategy = tf.distribute.get_strategy()
        name = "the question whether to overwrite a file"
        return bool(host_collectives.on_chief(strategy, lambda: original(filepath), name))

    return ask


def _undistributed(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """Keeps the models and optimizers that Keras makes to look at them out of the strategy.

    Making their variables would communicate, at a time that differs from worker to worker.
    """

    @functools.wraps(original)
    def get_attr_skipset(kind: str) -> set[str]:
        with eagerly_outside_of_scope():
            return original(kind)

    return get_attr_skipset


def _name_the_final_path(original: Callable[..., None]) -> Callable[..., None]:
    """Shows the user's path where Keras reports the temporary one."""

    @functools.wraps(original)
    def print_msg(message: object, *args: object, **kwargs: object) -> None:
        temporary, final = getattr(_local, "shown", None) or ("", "")
        if temporary and isinstance(message, str):
            message = message.replace(temporary, final)
        original(message, *args, **kwargs)

    return print_msg


def _mistakes_first(original: Callable[..., None]) -> Callable[..., None]:
    """Raises tfdist's own error about a file, where Keras would wrap it into a ValueError."""

    @functools.wraps(original)
    def raise_loading_failure(
        error_msgs: Mapping[object, tuple[object, Exception]], warn_only: bool = False
    ) -> None:
        for _, error in error_msgs.values():
            if isinstance(error, TfdistError) and not warn_only:
                raise error
        original(error_msgs, warn_only)

    return raise_loading_failure


def _read_from_hand(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Serves reads of on-read variables from the values that were read together."""

    @functools.wraps(original)
    def get_cross_replica(self: Variable) -> Tensor:
        noted = getattr(_local, "noted", None)
        if noted is not None:
            noted.setdefault(id(self), self)
            return tf.convert_to_tensor(self._primary)
        values = _at_hand()
        if values is None:
            return original(self)
        if id(self) not in values and _writing.is_up:
            raise SaveError(
                f"The variable {self.name!r} is summed over all workers when it is read, but only "
                "one worker is saving. Make it an attribute of the model or of one of its layers."
            )
        return values[id(self)] if id(self) in values else original(self)

    return get_cross_replica


def _reads_of(source: object) -> list[Any]:
    """The on-read variables that saving a model or export archive is going to read, in order."""
    if isinstance(source, TFExportArchive):
        lists = [v for v in vars(source._tf_trackable).values() if isinstance(v, (list, tuple))]
        return on_read_variables(variable for each in lists for variable in each)
    return walk(source, Nowhere())


def walk(source: object, store: Nowhere) -> list[Any]:
    """Lets Keras save a model to a store that keeps nothing.

    Returns:
        The on-read variables that it has read, or given to the store, in order.
    """
    divided: dict[int, Any] = {}
    _local.noted = {}
    try:
        # The writer is going to meet an error too, and report it.
        with contextlib.suppress(Exception), noted.set(divided):
            saving_lib._save_state(source, store, None, "", set())
        return list({**divided, **_local.noted}.values())
    finally:
        _local.noted = None


class Nowhere(saving_lib.H5IOStore):  # type: ignore[misc]
    """A store that keeps nothing: shows which variables a save reads."""

    def __init__(self) -> None:
        self.mode = "w"

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Mapping[str, str] | None = None) -> Nowhere:
        """The store itself, for every path."""
        return self

    def __setitem__(self, key: str, value: object) -> None:
        for variable in on_read_variables([value]):
            _local.noted.setdefault(id(variable), variable)


# TensorFlow's own checkpoints: `tf.train.Checkpoint`, its manager and `tf.saved_model.save`.


def _apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """All workers would write the same files of a checkpoint.

    `tf.train.Checkpoint` writes parts to a directory with a fixed name and moves them from there.
    If each of several workers runs the same line, one moves away what another still writes. A
    worker other than the chief therefore writes under a name of its own, and moves finished files
    to where they belong. All replicas hold the same values, so it does not matter whose files stay.
    Nobody waits for the others: the program may save on some workers only, or to other places.
    """

    @functools.wraps(original)
    def save(
        self: object, file_prefix: str | os.PathLike[str], *args: object, **kwargs: object
    ) -> object:
        rank = host_collectives.rank(tf.distribute.get_strategy())
        if rank == 0 or tf.is_tensor(file_prefix) or not tf.executing_eagerly():
            return original(self, file_prefix, *args, **kwargs)
        target = os.fspath(file_prefix)
        draft = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.worker{rank}")
        written = original(self, draft, *args, **kwargs).numpy().decode()
        target += written.removeprefix(draft)  # The number that the saver has added.
        # The index comes last: a checkpoint that has one is complete.
        for path in [*sorted(tf.io.gfile.glob(f"{written}.data-*")), f"{written}.index"]:
            tf.io.gfile.rename(path, target + path.removeprefix(written), overwrite=True)
        return tf.constant(target)

    return save


def _by_first_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """TensorFlow refuses to call what was loaded in a scope, except on a replica."""

    @functools.wraps(original)
    def call_flat(self: object, args: Sequence[Any], captured_inputs: Sequence[Any]) -> Any:
        if tf.distribute.in_cross_replica_context():
            captured_inputs = [
                each.values[0].handle if is_distributed(each) else each for each in captured_inputs
            ]
        return original(self, args, captured_inputs)

    return call_flat
