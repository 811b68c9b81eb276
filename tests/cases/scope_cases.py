"""Programs that leave the strategy's scope, or take from it what it needs."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import debug_mode
from tensorflow.python.eager import context

from tests.cases import common
from tests.cases.common import BATCH, scope
from tfdist.errors import ConfigError


def cleared(strategy: Any) -> dict[str, Any]:
    """Trains after `clear_session` within two scopes; and what is left when they are closed."""
    x, y = common.table(77)
    with scope(strategy), scope(strategy):
        keras.backend.clear_session()
        kept = strategy is None or tf.distribute.get_strategy() is strategy
        keras.utils.set_random_seed(0)
        model = common.dense_model()
        model.compile("adam", common.sparse_crossentropy())
        result = common.fitted(model, x, y)
        keras.utils.clear_session()
    result["kept"] = [kept]
    result["left"] = [not tf.distribute.has_strategy(), type(tf.Variable(0.0)).__name__]
    result["device"] = [context.context().device_name]
    return result


def debugged(strategy: Any, *, what: str) -> dict[str, Any]:
    """Trains, evaluates and predicts with functions of TensorFlow, or of `tf.data`, run eagerly."""
    x, y = common.table(43)
    functions = tf.config.run_functions_eagerly
    debug = {"functions": functions, "data": debug_mode.toggle_debug_mode}[what]
    with scope(strategy):
        model = common.dense_model()
        model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy(), metrics=["accuracy"])
        try:
            debug(True)
            result = common.fitted(model, x, y, epochs=1)
            result["evaluated"] = model.evaluate(x, y, BATCH, verbose=0)
            result["predicted"] = model.predict(x, BATCH, verbose=0)
        except ConfigError as error:
            result = {"error": str(error)}
        finally:
            debug(False)
    return result


def on_a_thread(strategy: Any, *, opened: bool) -> list[str]:
    """The errors of trainings on a thread, with a scope that it has opened itself or without."""
    x, y = common.table(16)
    errors: list[str] = []

    def train() -> None:
        try:
            with scope(strategy if opened else None):
                model = common.dense_model()
                model.compile("sgd", common.sparse_crossentropy())
                model.fit(x, y, 8, verbose=0)
        except ValueError as error:
            errors.append(str(error))

    with scope(strategy):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    return errors


def made_outside(strategy: Any, *, what: str) -> str:
    """The error of a `fit` with a part that was made outside of the scope; empty if none."""
    x, y = common.table(16)
    made = {
        "optimizer": lambda: keras.optimizers.Adam(),
        "metric": lambda: keras.metrics.SparseCategoricalAccuracy(),
        "layer": lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]),
        "frozen layer": lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]),
    }[what]()
    if what == "frozen layer":
        made.trainable = False
    with scope(strategy):
        inside = [made] if "layer" in what else []
        model = keras.Sequential([keras.Input((8,)), *inside, keras.layers.Dense(3)])
        loss = common.sparse_crossentropy()
        metrics = [made] if what == "metric" else []
        model.compile(made if what == "optimizer" else "sgd", loss, metrics=metrics)
    try:
        model.fit(x, y, 8, verbose=0)
    except ValueError as error:
        return str(error)
    return ""


def read_as_numbers(strategy: Any) -> dict[str, Any]:
    """What Python and NumPy read of TensorFlow's variables, in the scope and after it."""
    with scope(strategy):
        made = {
            "count": tf.Variable(3),
            "scale": tf.Variable(1.5, trainable=False),
            "vector": tf.Variable([1.0, 2.5]),
            "kept apart": tf.Variable(
                0.0,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            ),
        }
        inside = {name: _read(variable) for name, variable in made.items()}
    return {"inside": inside, "after": {name: _read(made[name]) for name in ("count", "vector")}}


def _read(variable: Any) -> list[Any]:
    values = [np.asarray(variable), np.array(variable, "float64"), np.mean(variable)]
    if not variable.shape.rank:
        values += [float(variable), int(variable), complex(variable).real]
    return values
