"""Keras's callbacks under a strategy: called on every worker, writing on one.

Decisions that the workers take from their logs are the chief's for all, and an error in a callback
between two epochs reaches every worker: nobody is left waiting for one that has stopped.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import types
from tfdist._keras import CallbackList, OrbaxCheckpoint, TensorFlowTrainer, file_utils
from tfdist._keras import keras_callbacks as callbacks
from tfdist.comm import host_collectives
from tfdist.errors import ConfigError
from tfdist.keras import backup, batch_logs, saving, stopping
from tfdist.keras.hooks import Hook, fitting
from tfdist.types import Callback, Logs, Model, Strategy


def hooks() -> list[Hook]:
    """The seams of Keras's callbacks that write, and of the list that calls them."""
    board = callbacks.TensorBoard
    return [
        Hook(TensorFlowTrainer, "fit", _note_fit),
        Hook(CallbackList, "on_train_begin", _begin_together),
        Hook(CallbackList, "on_epoch_end", _fail_and_stop_together),
        Hook(CallbackList, "on_train_end", _fail_together),
        Hook(callbacks.ModelCheckpoint, "_should_save_model", _as_chief_decides),
        Hook(callbacks.CSVLogger, "on_train_begin", _on_chief_only),
        Hook(callbacks.CSVLogger, "on_epoch_end", _on_chief_only),
        Hook(callbacks.CSVLogger, "on_train_end", _on_chief_only),
        Hook(callbacks.RemoteMonitor, "on_epoch_end", _on_chief_only),
        Hook(board, "_train_writer", _silent_elsewhere),
        Hook(board, "_val_writer", _silent_elsewhere),
        Hook(board, "_start_profiler", _on_chief_only),
        Hook(board, "_configure_embeddings", _on_chief_only),
        Hook(board, "_log_weights", _with_shared_reads),
        Hook(OrbaxCheckpoint, "set_model", _refuse),
        *stopping.hooks(),
        *backup.hooks(),
    ]


def _strategy() -> Strategy:
    return tf.distribute.get_strategy()


def _is_chief() -> bool:
    return bool(getattr(_strategy(), "is_chief", True))


def _note_fit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Marks that `fit` runs, in which all workers make the same calls.

    A loop of the user's own may call its callbacks on the chief alone.
    """

    @functools.wraps(original)
    def fit(self: Model, *args: object, **kwargs: object) -> object:
        with fitting.up():
            return original(self, *args, **kwargs)

    return fit


def _together(name: str, call: Callable[[], Any]) -> list[Any]:
    if not fitting.is_up:
        return [call()]
    return host_collectives.together(_strategy(), call, name)


def _fail_together(original: Callable[..., None]) -> Callable[..., None]:
    """A callback that fails on one worker leaves the others in their next collective."""

    @functools.wraps(original)
    def call(self: object, *args: object, **kwargs: object) -> None:
        _together(f"callbacks {original.__name__}", lambda: original(self, *args, **kwargs))

    return call


def _begin_together(original: Callable[..., None]) -> Callable[..., None]:
    """Begins together, and finds out what callbacks of any worker do within an epoch."""

    @functools.wraps(original)
    def on_train_begin(self: types.CallbackList, logs: Logs | None = None) -> None:
        def call() -> list[bool]:
            original(self, logs)
            return [stopping.may_stop(self), batch_logs.are_read(self)]

        answers = zip(*_together("callbacks on_train_begin", call), strict=True)
        may_stop, read = map(any, answers)
        stopping.ask_at_batches(self, may_stop)
        batch_logs.note_readers(self.model, read)

    return on_train_begin


def _fail_and_stop_together(original: Callable[..., None]) -> Callable[..., None]:
    """Ends training on all workers if a callback ends it on one, as after a time limit."""

    @functools.wraps(original)
    def on_epoch_end(self: types.CallbackList, epoch: int, logs: Logs | None = None) -> None:
        def call() -> bool:
            original(self, epoch, logs)
            stopped = bool(getattr(self.model, "stop_training", False))
            return stopping.put_off(self) or stopped

        if any(_together("callbacks on_epoch_end", call)):
            self.model.stop_training = True

    return on_epoch_end


def _as_chief_decides(original: Callable[..., bool]) -> Callable[..., bool]:
    """Values that differ in their last bits let workers decide differently whether to save."""

    @functools.wraps(original)
    def should_save_model(
        self: Callback, epoch: int, batch: int | None, logs: Logs | None, filepath: str
    ) -> bool:
        decision = bool(original(self, epoch, batch, logs, filepath))

        def decide() -> bool:
            directory = os.path.dirname(filepath)
            if decision and directory and not file_utils.is_remote_path(directory):
                os.makedirs(directory, exist_ok=True)  # else the workers race to make it
            return decision

        return bool(host_collectives.on_chief(_strategy(), decide, "whether to save a checkpoint"))

    return should_save_model


def _on_chief_only(original: Callable[..., None]) -> Callable[..., None]:
    """Workers that write one file overwrite each other's lines."""

    @functools.wraps(original)
    def call(self: object, *args: object, **kwargs: object) -> None:
        if _is_chief():
            original(self, *args, **kwargs)

    return call


def _silent_elsewhere(original: Any) -> property:
    """TensorBoard's writer on the chief, on other workers one that writes nothing."""

    def writer(self: Callback) -> object:
        return original.fget(self) if _is_chief() else tf.summary.create_noop_writer()

    return property(writer)


def _with_shared_reads(original: Callable[..., None]) -> Callable[..., None]:
    """Lets the chief read for its histograms what is summed over all workers when read."""

    @functools.wraps(original)
    def log_weights(self: Callback, epoch: int) -> None:
        weights = [weight for layer in self.model.layers for weight in layer.weights]
        with saving.shared_reads(saving.on_read_variables(weights)):
            original(self, epoch)

    return log_weights


def _refuse(original: Callable[..., None]) -> Callable[..., None]:
    """Orbax coordinates processes of JAX only."""

    @functools.wraps(original)
    def set_model(self: Callback, model: Model) -> None:
        workers = host_collectives.worker_count(_strategy())
        if workers > 1:
            raise ConfigError(
                f"OrbaxCheckpoint cannot be used with {workers} TensorFlow processes: Orbax "
                "coordinates processes of JAX only. Use ModelCheckpoint or BackupAndRestore, which "
                "write once for all workers."
            )
        original(self, model)

    return set_model
