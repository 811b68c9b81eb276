"""Saving cases: files on a directory that all workers share."""

from __future__ import annotations

import builtins
import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.models import save_model  # before any scope is opened

from tests.cases import common
from tests.cases.common import BATCH, UNEVEN, scope
from tests.cases.harness_cases import rank
from tests.cases.watching import moves


def _model() -> keras.Model:
    model = common.conv_model()
    model.compile(
        keras.optimizers.Adam(0.01),
        common.sparse_crossentropy(),
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
    )
    return model


def _fit(model: keras.Model, epochs: int, **kwargs: Any) -> Any:
    x, y = common.images(UNEVEN)
    return model.fit(x, y, BATCH, epochs, shuffle=False, verbose=0, **kwargs)


def _state(model: keras.Model) -> dict[str, Any]:
    return {
        "weights": common.weights(model),
        "optimizer": [np.asarray(v.numpy()) for v in model.optimizer.variables],
    }


def write_all(strategy: Any, path: str) -> dict[str, Any]:
    """Trains and saves in every format; tells what this process moved into place."""
    with scope(strategy):
        model = _model()
    _fit(model, 1)
    with scope(strategy), moves() as moved:
        model.save(f"{path}/model.keras")
        save_model(model, f"{path}/function.keras")
        model.save_weights(f"{path}/model.weights.h5")
        model.save_weights(f"{path}/parts.weights.json", max_shard_size=3e-7)
        model.save(f"{path}/directory", zipped=False)
        if getattr(strategy, "zero", 0) < 3:
            model.export(f"{path}/exported", verbose=False)
        model.save(f"{path}/model.h5")  # last: Keras's .keras files after an .h5 lack the optimizer
        own = sorted(moved)
    x, _ = common.images(20)
    return {
        "state": _state(model),
        "moved": own,
        "predicted": model.predict(x, verbose=0),
        "files": sorted(os.listdir(path)),
    }


def read_all(strategy: Any, path: str) -> dict[str, Any]:
    """Loads what `write_all` wrote, in every format."""
    with scope(strategy):
        found = {
            name: _state(keras.models.load_model(f"{path}/{name}"))
            for name in ("model.keras", "function.keras", "directory")
        }
        found["model.h5"] = {
            "weights": common.weights(keras.models.load_model(f"{path}/model.h5", compile=False))
        }
        for name in ("model.weights.h5", "parts.weights.json", "model.keras"):
            model = _model()
            model.optimizer.build(model.trainable_variables)
            model.load_weights(f"{path}/{name}")
            found[f"weights of {name}"] = _state(model)
    return found


def serve(strategy: Any, path: str) -> np.ndarray:
    """Calls an exported model in all ways, loaded in the scope: the results, one after another."""
    x, _ = common.images(20)
    with scope(strategy):
        loaded = tf.saved_model.load(f"{path}/exported")
        signature = loaded.signatures["serving_default"]
        layer = keras.layers.TFSMLayer(f"{path}/exported", call_endpoint="serve")
        results = [
            next(iter(signature(tf.constant(x)).values())),
            loaded.serve(tf.constant(x)),
            tf.function(loaded.serve)(tf.constant(x)),
            keras.Sequential([keras.Input(x.shape[1:]), layer]).predict(x, verbose=0),
        ]
    return np.stack([np.asarray(each) for each in results])


def continued(strategy: Any, path: str) -> dict[str, Any]:
    """One epoch, save, load in the scope, one more epoch."""
    with scope(strategy):
        _fit_and_save(path)
        model = keras.models.load_model(f"{path}/half.keras")
        return common.fitted(model, *common.images(UNEVEN), epochs=1)


def _fit_and_save(path: str) -> None:
    model = _model()
    _fit(model, 1)
    model.save(f"{path}/half.keras")


def uninterrupted(strategy: Any) -> dict[str, Any]:
    """What `continued` must give."""
    with scope(strategy):
        model = _model()
        _fit(model, 1)
        return common.fitted(model, *common.images(UNEVEN), epochs=1)


@contextlib.contextmanager
def disk_full_at(size: int) -> Iterator[None]:
    """Lets this process's files grow no larger than `size` bytes."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def _attempt(action: Callable[[], Any]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        seconds = time.monotonic() - start
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"kinds": kinds, "message": str(error), "seconds": seconds}
    return {}


def full_disk(strategy: Any, path: str, limited: bool = True) -> dict[str, Any]:
    """Saves once, then again on a disk that is full; the first files must survive.

    Args:
        strategy: what to save under.
        path: where.
        limited: whether the case makes the disk full itself, on the chief.
    """
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(20_000)])
        model.compile("sgd", "mse", metrics=["mae"])
        writers: dict[str, Callable[[str], Any]] = {
            "full.keras": model.save,
            "full.h5": model.save,
            "full.weights.h5": model.save_weights,
            "full": lambda place: model.export(place, verbose=False),
        }
        for name, write in writers.items():
            write(f"{path}/{name}")
        full = disk_full_at(50_000) if limited and rank(strategy) == 0 else contextlib.nullcontext()
        with full:
            failures = {
                name: _attempt(lambda write=write, name=name: write(f"{path}/{name}"))
                for name, write in writers.items()
            }
        model.load_weights(f"{path}/full.weights.h5")
        keras.models.load_model(f"{path}/full.keras")
        keras.models.load_model(f"{path}/full.h5", compile=False)
    return {"failures": failures, "files": sorted(os.listdir(path))}


@keras.saving.register_keras_serializable("tfdist_tests")
class OwnMetric(keras.Model):
    """A model with its own `train_step` and a metric as an attribute that it saves."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(3)
        self.tracker = keras.metrics.Mean(name="tracked")

    def call(self, inputs: Any) -> Any:
        """One dense layer."""
        return self.dense(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Tracks the loss without training."""
        x, y = data
        loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, self(x), True))
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}

    def save_own_variables(self, store: Any) -> None:
        """Saves the metric, which Keras does not."""
        for variable in self.tracker.variables:
            store[variable.name] = variable

    def load_own_variables(self, store: Any) -> None:
        """Loads the metric."""
        for variable in self.tracker.variables:
            variable.assign(store[variable.name])


def own_metric(strategy: Any, path: str) -> dict[str, Any]:
    """Saves a metric whose variables are summed over the workers when they are read."""
    x, y = common.table(UNEVEN)
    with scope(strategy):
        model = OwnMetric()
        model.compile("sgd")
        model.fit(x, y, BATCH, verbose=0)
        result = float(np.asarray(model.tracker.result()))
        model.save(f"{path}/own.keras")
        loaded = keras.models.load_model(f"{path}/own.keras")
        with disk_full_at(100) if rank(strategy) == 0 else contextlib.nullcontext():
            failure = _attempt(lambda: model.save_weights(f"{path}/own.weights.h5"))
        return {
            "result": result,
            "loaded": float(np.asarray(loaded.tracker.result())),
            "failure": failure,
        }


def bad_places(strategy: Any, path: str) -> dict[str, Any]:
    """Paths that cannot be written, and arguments that Keras refuses."""
    with scope(strategy):
        model = _model()
        os.makedirs(f"{path}/taken.keras", exist_ok=True)
        return {
            "directory": _attempt(lambda: model.save(f"{path}/taken.keras")),
            "no directory": _attempt(lambda: model.save("/proc/none/model.keras")),
            "extension": _attempt(lambda: model.save(f"{path}/model.zip")),
        }


def answers(strategy: Any, path: str, answer: str) -> dict[str, Any]:
    """Saves over a file with `overwrite=False`; only the chief's user is asked."""
    asked: list[str] = []
    asking = builtins.input
    with scope(strategy):
        model = _model()
        model.save(f"{path}/kept.keras")
        before = os.stat(f"{path}/kept.keras").st_ino
        builtins.input = lambda text="": asked.append(text) or answer
        try:
            failure = _attempt(lambda: model.save(f"{path}/kept.keras", overwrite=False))
        finally:
            builtins.input = asking
    replaced = os.stat(f"{path}/kept.keras").st_ino != before
    return {"asked": len(asked), "replaced": replaced, "failure": failure}


def own_paths(strategy: Any, path: str) -> list[str]:
    """Saves as TensorFlow's guides teach: every worker to a path of its own."""
    mine = f"{path}/worker{rank(strategy)}"
    with scope(strategy):
        _model().save(f"{mine}/model.keras")
        keras.models.load_model(f"{mine}/model.keras")
    return os.listdir(mine)


def save_for_ever(strategy: Any, path: str) -> None:
    """Saves the same model again and again."""
    with scope(strategy):
        model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(20_000)])
        while True:
            model.save(f"{path}/again.keras")
            model.export(f"{path}/again", verbose=False)


def load_again(strategy: Any, path: str) -> list[str]:
    """Loads what `save_for_ever` left, and saves once more."""
    with scope(strategy):
        model = keras.models.load_model(f"{path}/again.keras")
        tf.saved_model.load(f"{path}/again")
        model.save(f"{path}/again.keras")
        model.export(f"{path}/again", verbose=False)
    return sorted(os.listdir(path))
