"""Callback cases: what acts on training must act alike, what writes must write once."""

from __future__ import annotations

import functools
import gc
import glob
import os
import signal
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction

from tests.cases import common
from tests.cases.common import BATCH, UNEVEN, scope
from tests.cases.harness_cases import rank
from tests.cases.watching import die_before_move, moves


def _model(make: Callable[[], keras.Model] = common.dense_model, **options: Any) -> keras.Model:
    model = make()
    optimizer = keras.optimizers.Adam(0.01, **options)
    model.compile(optimizer, common.sparse_crossentropy(), metrics=["accuracy"])
    return model


def _fit(model: keras.Model, callbacks: list[Any], epochs: int = 3, **kwargs: Any) -> Any:
    x, y = common.table(UNEVEN)
    kwargs = {"validation_data": (x[:77], y[:77]), **kwargs}
    return model.fit(x, y, BATCH, epochs, 0, callbacks, shuffle=False, **kwargs)


class _Poison(keras.callbacks.Callback):
    """Makes the weights NaN in the third batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Poisons the weights."""
        if batch == 2:
            self.model.set_weights([np.full_like(w, np.nan) for w in self.model.get_weights()])


class _Counts(keras.callbacks.Callback):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.calls[name] = self.calls.get(name, 0) + 1
        return super().__getattribute__(name)


_ACTING: dict[str, Callable[[], list[Any]]] = {
    "early_stopping": lambda: [
        keras.callbacks.EarlyStopping("val_loss", 0.05, restore_best_weights=True)
    ],
    "plateau": lambda: [keras.callbacks.ReduceLROnPlateau("val_loss", 0.1, 1, min_delta=0.05)],
    "schedule": lambda: [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)],
    "nan": lambda: [_Poison(), keras.callbacks.TerminateOnNaN()],
    "ema": lambda: [keras.callbacks.SwapEMAWeights()],
    "ema_epoch": lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
}


def acting(strategy: Any, kind: str) -> dict[str, Any]:
    """Trains with a callback that acts on training."""
    options = {"use_ema": True, "ema_momentum": 0.9} if kind.startswith("ema") else {}
    with scope(strategy):
        model = _model(**options)
        counts = _Counts()
        epochs = 6 if kind in ("early_stopping", "plateau") else 3
        done = _fit(model, [*_ACTING[kind](), counts], epochs)
    return {
        "history": common.history(done),
        "weights": common.weights(model),
        "calls": counts.calls,
        "rate": float(np.asarray(model.optimizer.learning_rate)),
    }


def checkpoints(strategy: Any, path: str) -> dict[str, Any]:
    """ModelCheckpoint in several ways, in a directory that does not exist yet."""
    make = keras.callbacks.ModelCheckpoint
    folder = f"{path}/new/folder"
    with scope(strategy), moves() as moved:
        model = _model()
        callbacks = [
            make(f"{folder}/best.keras", "val_loss", save_best_only=True),
            make(f"{folder}/{{epoch:02d}}-{{val_loss:.3f}}.weights.h5", save_weights_only=True),
            make(f"{folder}/step.keras", save_freq=7),
        ]
        done = _fit(model, callbacks, epochs=2)
        moved = list(moved)
        best = keras.models.load_model(f"{folder}/best.keras")
        x, y = common.table(UNEVEN)
        score = best.evaluate(x[:77], y[:77], BATCH, verbose=0)
    return {
        "history": common.history(done),
        "files": sorted(os.listdir(folder)),
        "best": score[0],
        "moved": len(moved),
    }


def log_csv(strategy: Any, path: str) -> str:
    """CSVLogger twice, the second time appending; returns the file."""
    os.makedirs(path, exist_ok=True)
    with scope(strategy):
        model = _model()
        _fit(model, [keras.callbacks.CSVLogger(f"{path}/log.csv")], epochs=2)
        _fit(model, [keras.callbacks.CSVLogger(f"{path}/log.csv", append=True)], epochs=1)
    with open(f"{path}/log.csv") as file:
        return file.read()


def board(strategy: Any, path: str, options: dict[str, Any]) -> dict[str, Any]:
    """TensorBoard with all it can write; returns what is in its event files."""
    with scope(strategy):
        model = _model(common.dense_model)
        done = _fit(model, [keras.callbacks.TensorBoard(f"{path}/logs", **options)], epochs=2)
        model.evaluate(*common.table(40), BATCH, verbose=0)
    files = glob.glob(f"{path}/logs/**/events.out.tfevents.*", recursive=True)
    tags: dict[str, int] = {}
    for file in files:
        for record in tf.data.TFRecordDataset(file):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                kind = os.path.basename(os.path.dirname(file))
                tags[f"{kind}/{value.tag}"] = tags.get(f"{kind}/{value.tag}", 0) + 1
    return {
        "history": common.history(done),
        "files": sorted(os.path.relpath(os.path.dirname(f), path) for f in files),
        "tags": tags,
        "profiles": len(glob.glob(f"{path}/logs/**/*.xplane.pb", recursive=True)),
    }


class _StopsOnOne(keras.callbacks.Callback):
    """Ends training on one worker, as a time limit may."""

    def __init__(self, strategy: Any, epoch: int) -> None:
        super().__init__()
        self._here, self._epoch = rank(strategy) == strategy.world.workers - 1, epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stops training."""
        if self._here and epoch == self._epoch:
            self.model.stop_training = True


class _FailsOnOne(keras.callbacks.Callback):
    """Raises on one worker."""

    def __init__(self, strategy: Any, worker: int) -> None:
        super().__init__()
        self._here = rank(strategy) == worker

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Raises."""
        if self._here:
            raise FileNotFoundError(f"no file after epoch {epoch}")


def stop_on_one(strategy: Any) -> int:
    """Number of epochs of a training that one worker stops after the second."""
    with scope(strategy):
        return len(_fit(_model(), [_StopsOnOne(strategy, 1)]).history["loss"])


class _StopsInEpoch(keras.callbacks.Callback):
    """Ends training in the middle of an epoch, on the last worker or on all."""

    def __init__(self, strategy: Any, step: int, everywhere: bool) -> None:
        super().__init__()
        self._here = everywhere or rank(strategy) == strategy.world.workers - 1
        self._step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops training."""
        if self._here and batch == self._step:
            self.model.stop_training = True


class StopsElsewhere(keras.Model):
    """A model that ends Keras's loops on one worker while a batch is made, as a signal may."""

    def __init__(self, strategy: Any, *flags: str) -> None:
        super().__init__()
        self.out = keras.layers.Dense(3)
        self._flags = flags
        self._here = rank(strategy) == strategy.world.workers - 1

    def call(self, inputs: Any) -> Any:
        """Logits; stops while it is traced."""
        for flag in self._flags if self._here else ():
            setattr(self, flag, True)
        return self.out(inputs)


def stop_in_epoch(strategy: Any, *, how: str) -> dict[str, Any]:
    """A training that ends in the middle of an epoch, with an evaluation after it.

    Args:
        strategy: what to train on.
        how: "one" or "all" workers stop; "only_there": only one has the callback; "outside" of a
            callback.
    """
    x, y = common.table(UNEVEN)
    with scope(strategy):
        if how == "outside":
            model = _model(lambda: StopsElsewhere(strategy, "stop_training"))
            callbacks = []
        else:
            model = _model()
            stops = _StopsInEpoch(strategy, 3, how == "all")
            callbacks = [stops] if how != "only_there" or stops._here else []
        done = _fit(model, callbacks)
        score = model.evaluate(x[:77], y[:77], BATCH, verbose=0, return_dict=True)
    return {
        "history": common.history(done),
        "weights": common.weights(model),
        "score": common.numbers(score),
        "steps": int(np.asarray(model.optimizer.iterations)),
    }


class _StopsLoop(keras.callbacks.Callback):
    """Ends an evaluation or a prediction after some batches, on the last worker or on all."""

    def __init__(self, strategy: Any, everywhere: bool) -> None:
        super().__init__()
        self._here = everywhere or rank(strategy) == strategy.world.workers - 1

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops the evaluation."""
        if self._here and batch == 2:
            self.model.stop_evaluating = True

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops the prediction."""
        if self._here and batch == 2:
            self.model.stop_predicting = True


def stop_loops(strategy: Any, *, how: str) -> dict[str, Any]:
    """An evaluation and a prediction that end early, each with a whole one after it.

    Args:
        strategy: what to run on.
        how: "one" or "all" workers stop; "only_there": only one has the callback; "outside" of a
            callback.
    """
    x, y = common.table(77)
    with scope(strategy):
        flags = ("stop_evaluating", "stop_predicting")
        stopping = functools.partial(StopsElsewhere, strategy, *flags)
        model = _model(stopping) if how == "outside" else _model()
        stops = _StopsLoop(strategy, how == "all")
        callbacks = [stops] if how != "outside" and (how != "only_there" or stops._here) else []
        done: dict[str, Any] = {"rows": [], "scores": []}
        for each in (callbacks, []):
            scores = model.evaluate(x, y, 8, verbose=0, return_dict=True, callbacks=each)
            done["scores"].append(common.numbers(scores))
            done["rows"].append(model.predict(x, 8, verbose=0, callbacks=each))
    return done


def fail_on_one(strategy: Any, path: str, worker: int) -> str:
    """The error of a training in which a callback fails on one worker."""
    with scope(strategy):
        callbacks = [
            _FailsOnOne(strategy, worker),
            keras.callbacks.ModelCheckpoint(f"{path}/later.keras"),
        ]
        try:
            _fit(_model(), callbacks)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def back_up(
    strategy: Any,
    path: str | None,
    save_freq: Any = "epoch",
    model: str = "dense",
    double: bool = False,
    die: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """Trains three epochs with a backup after each, or after some steps.

    Args:
        strategy: what to train on.
        path: the shared directory; None for training without a backup.
        save_freq: as in BackupAndRestore.
        model: a key of `common.MODELS`.
        double: whether to keep two backups.
        die: kills the chief with -9 before it moves the named file for the n-th time, or, where the
            name is "batch", in the n-th batch.
    """
    callbacks = []
    if path:
        os.makedirs(path, exist_ok=True)
        backup = keras.callbacks.BackupAndRestore(
            f"{path}/backup", save_freq=save_freq, double_checkpoint=double
        )
        callbacks.append(backup)
    seen: list[int] = []

    def on_batch(batch: int, logs: Any) -> None:
        seen.append(batch)
        if die and rank(strategy) == 0 and die == ("batch", len(seen)):
            os.kill(os.getpid(), signal.SIGKILL)

    if die and rank(strategy) == 0 and die[0] != "batch":
        die_before_move(*die)
    with scope(strategy):
        built = _model(common.MODELS[model][0])
        counting = keras.callbacks.LambdaCallback(on_train_batch_end=on_batch)
        done = _fit(built, [*callbacks, counting], epochs=3)
        again = _fit(built, [], epochs=1)
    return {
        "history": common.history(done),
        "again": common.history(again),
        "steps": len(seen),
        "iterations": int(built.optimizer.iterations.numpy()),
        "weights": common.weights(built),
        "left": os.listdir(path) if path else [],
    }


def damage_backup(strategy: Any, path: str) -> None:
    """Cuts off the end of the last backup, as a broken disk might."""
    del strategy
    file = f"{path}/backup/latest.weights.h5"
    os.truncate(file, os.path.getsize(file) // 2)


class _BatchLogs(keras.callbacks.Callback):
    """Keeps the logs of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keeps the logs."""
        self.seen.append({name: float(value) for name, value in logs.items()})


class _OneMore(keras.callbacks.Callback):
    """Trains on a batch at the end of each epoch and keeps its logs."""

    def __init__(self, seen: _BatchLogs, x: Any, y: Any) -> None:
        super().__init__()
        self.keep, self.batch = seen.on_train_batch_end, (x, y)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Trains."""
        self.keep(epoch, self.model.train_on_batch(*self.batch, return_dict=True))


def _steps() -> list[Any]:
    """The functions of training steps that are alive, those of other cases among them."""
    functions = [each for each in gc.get_objects() if isinstance(each, AtomicFunction)]
    return [each for each in functions if b"one_step_on_data" in each.name]


def _exchanges_in_steps(others: list[Any]) -> list[int]:
    """The exchanges in the graph of each training step that is alive, but for some."""
    known = set(map(id, others))
    steps = [each for each in _steps() if id(each) not in known]
    kinds = ("CollectiveReduce", "HorovodGroupedAllreduce", "HorovodAllreduce")
    return [sum(node.op.startswith(kinds) for node in s.definition.node_def) for s in steps]


def batch_logs(strategy: Any, readers: str) -> dict[str, Any]:
    """Logs of batches that callbacks or the program's own loop read, and the step's exchanges.

    Args:
        readers: `"none"` has only the progress bar, `"chief"` a callback on the chief alone,
            `"loop"` calls Keras's train function by itself, `"single"` is a callback that trains
            on one batch more at the end of an epoch.
    """
    others = _steps()
    with scope(strategy):
        model = _model()
        seen = _BatchLogs()
        if readers == "loop":
            dataset = tf.data.Dataset.from_tensor_slices(common.table(UNEVEN)).batch(BATCH)
            model.make_train_function()
            batches = iter(model.distribute_strategy.experimental_distribute_dataset(dataset))
            seen.set_model(model)
            for batch in range(3):
                seen.on_train_batch_end(batch, model.train_function(batches))
            return {"seen": seen.seen, "weights": model.get_weights()}
        callbacks = [seen] if readers == "chief" and rank(strategy) == 0 else []
        if readers == "single":
            x, y = common.table(UNEVEN)
            callbacks = [_OneMore(seen, x[:7], y[:7])]
        history = _fit(model, callbacks, 2).history
        return {
            "seen": seen.seen,
            "history": history,
            "exchanges": _exchanges_in_steps(others),
            "weights": model.get_weights(),
        }
