"""Cases of sharded checkpoints, on a directory that all processes share."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common, mesh_cases
from tests.cases.common import BATCH, scope
from tests.cases.saving_cases import disk_full_at
from tfdist.comm import host_collectives
from tfdist.sharding import checkpoint

#: Two batches of 32 and one of 13.
EXAMPLES = 77


@contextlib.contextmanager
def _sharded(strategy: Any) -> Iterator[None]:
    """The strategy's scope, in which files are sharded."""
    with scope(strategy):
        if strategy is not None:
            strategy.checkpoints = "sharded"
        try:
            yield
        finally:
            if strategy is not None:
                strategy.checkpoints = "whole"


def _made(policy: str = "float32") -> tuple[keras.Model, Any]:
    """A compiled model with a normalization, whose statistics are whole everywhere."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(0)
        x, y = common.tokens(EXAMPLES)
        inputs = keras.Input((6,), dtype="int32")
        hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 8)(inputs))
        hidden = keras.layers.Dense(16, "relu")(
            keras.layers.BatchNormalization(synchronized=True)(hidden)
        )
        hidden = keras.layers.Dense(8)(hidden)
        model = keras.Model(inputs, keras.layers.Dense(2, dtype="float32")(hidden))
        model.compile(mesh_cases.adam(), common.sparse_crossentropy(), metrics=["accuracy"])
        return model, (x, y)
    finally:
        keras.config.set_dtype_policy(before)


def _state(model: keras.Model) -> dict[str, Any]:
    return {
        "weights": [np.float32(each) for each in common.weights(model)],
        "optimizer": [np.float32(v.numpy()) for v in model.optimizer.variables],
    }


def _fit(model: keras.Model, data: Any, epochs: int, **options: Any) -> Any:
    return model.fit(*data, BATCH, epochs, shuffle=False, verbose=0, **options)


def saved(strategy: Any, path: str, policy: str = "float32", epochs: int = 1) -> dict[str, Any]:
    """Trains and saves the model, and its weights alone, twice over each other."""
    with _sharded(strategy):
        model, data = _made(policy)
        weights = keras.callbacks.ModelCheckpoint(f"{path}/w.weights.h5", save_weights_only=True)
        _fit(model, data, epochs, callbacks=[weights])
        model.save(f"{path}/model.keras")
        before = sorted(os.listdir(f"{path}/model.keras"))
        model.save(f"{path}/model.keras")
        state = _state(model)
    after = sorted(os.listdir(f"{path}/model.keras"))
    processes = host_collectives.worker_count(strategy)
    return {**state, "before": before, "after": after, "processes": processes}


def uninterrupted(strategy: Any, policy: str = "float32") -> dict[str, Any]:
    """The state after the epoch before the save and the one after it, and the latter's loss."""
    with scope(strategy):
        model, data = _made(policy)
        _fit(model, data, 1)
        history = _fit(model, data, 1)
        return {**_state(model), "loss": history.history["loss"]}


def loaded(strategy: Any, path: str, policy: str = "float32") -> dict[str, Any]:
    """The state of the model, and of a new one with the weights; and after an epoch more."""
    with scope(strategy):
        model = keras.models.load_model(f"{path}/model.keras")
        other, data = _made(policy)
        other.optimizer.build(other.trainable_variables)
        other.load_weights(f"{path}/w.weights.h5")
        result = {"model": _state(model), "weights": _state(other)}
        history = _fit(model, data, 1)
        return {**result, "on": {**_state(model), "loss": history.history["loss"]}}


def refused(strategy: Any, path: str) -> str:
    """The error of loading a model."""
    with scope(strategy):
        try:
            keras.models.load_model(path)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def checkpointed(strategy: Any, path: str) -> dict[str, Any]:
    """The states of a model and of another that reads its checkpoint, and texts of weights."""
    own = f"{path}/{strategy.shard.worker}"
    with scope(strategy):
        model, data = _made("float32")
        _fit(model, data, 1)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(own)
        other, _ = _made("float32")
        other.optimizer.build(other.trainable_variables)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(own)
        result = {"written": _state(model), "read": _state(other)}
        return {**result, "texts": [repr(each) for each in model.trainable_variables]}


class Interrupted(RuntimeError):
    """Ends a training in the middle of an epoch."""


def backed_up(strategy: Any, path: str, interrupt: bool) -> dict[str, Any]:
    """Three epochs with a backup at every second batch, up to the second's second batch if asked.

    Returns:
        The state at the end and the history; the files of the backup if it was interrupted.
    """

    def stop(batch: int, logs: Any) -> None:
        if interrupt and next(steps) == 5:
            raise Interrupted(batch)

    steps = iter(range(1, 100))
    with _sharded(strategy):
        model, data = _made()
        backup = keras.callbacks.BackupAndRestore(path, save_freq=2, double_checkpoint=True)
        ending = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        try:
            history = _fit(model, data, 3, callbacks=[backup, ending])
        except Interrupted:
            return {"files": sorted(os.listdir(f"{path}/latest.weights.h5"))}
        return {**_state(model), "history": history.history}


def dying(strategy: Any, path: str, worker: int, place: str) -> None:
    """Saves, trains on, and dies on one worker while the second save is under way."""
    with _sharded(strategy):
        model, data = _made()
        _fit(model, data, 1)
        model.save(f"{path}/model.keras")
        model.save(f"{path}/expected.keras")
        _fit(model, data, 1)
        if strategy.world.worker == worker:
            setattr(checkpoint, place, lambda *_, **__: _die_in_the_middle(f"{path}/model.keras"))
        model.save(f"{path}/model.keras")


def _die_in_the_middle(folder: str) -> None:
    """Kills this process once a file of the second save is there, beside the two of the first."""
    deadline = time.monotonic() + 30
    while len(list(pathlib.Path(folder).glob("part-*"))) <= 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def states(strategy: Any, path: str) -> list[Any]:
    """The states of the two models of `dying`."""
    with scope(strategy):
        names = ("model.keras", "expected.keras")
        models = [keras.models.load_model(f"{path}/{name}") for name in names]
        return [_state(each) for each in models]


def full_disk(strategy: Any, path: str) -> dict[str, Any]:
    """Saves, and again while worker 1's disk is full."""
    with _sharded(strategy):
        model, data = _made()
        _fit(model, data, 1)
        model.save(f"{path}/model.keras")
        before = sorted(os.listdir(f"{path}/model.keras"))
        host_collectives.all_gather_json(strategy, None, "listing the files")
        full = disk_full_at(1000) if strategy.world.worker == 1 else contextlib.nullcontext()
        with full:
            try:
                model.save(f"{path}/model.keras")
                error = ""
            except OSError as caught:
                error = f"{type(caught).__name__}: {caught}"
        # Each process deletes its own part.
        host_collectives.all_gather_json(strategy, None, "deleting the parts")
        after = sorted(os.listdir(f"{path}/model.keras"))
    return {"error": error, "before": before, "after": after}


def read_on_one(strategy: Any) -> None:
    """The chief reads the weights in the middle of an epoch."""
    with scope(strategy):
        model, data = _made()
        chief = strategy.world.worker == 0

        def read(batch: int, logs: Any) -> None:
            model.get_weights()

        reads = keras.callbacks.LambdaCallback(on_train_batch_end=read)
        _fit(model, data, 1, callbacks=[reads] if chief else [])
