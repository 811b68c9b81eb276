"""`predict` and the methods that take one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.common import BATCH, scope


class _Identity(keras.layers.Layer):
    """Returns its inputs: a prediction then tells which row it belongs to."""

    def call(self, inputs: Any) -> Any:
        """The inputs."""
        return inputs


def predict(strategy: Any) -> dict[str, Any]:
    """Predictions that are the row numbers, from several kinds of input."""
    rows = np.arange(77, dtype="float32")[:, None]
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    with scope(strategy):
        single = keras.Sequential([keras.Input((1,)), _Identity()])
        inputs = {"a": keras.Input((1,), name="a"), "b": keras.Input((1,), name="b")}
        total = keras.layers.Add()([inputs["a"], inputs["b"]])
        several = keras.Model(inputs, {"sum": total, "pair": [inputs["a"], inputs["b"]]})
        both = {"a": rows, "b": 10 * rows}
        listed = keras.Model([inputs["a"], inputs["b"]], total)
        return {
            "uneven": single.predict(rows, BATCH, verbose=0),
            "one_left": single.predict(rows[:65], BATCH, verbose=0),
            "one": single.predict(rows[:1], BATCH, verbose=0),
            "dataset": single.predict(dataset.batch(10), verbose=0),
            "steps": single.predict(dataset.batch(10).repeat(), steps=3, verbose=0),
            "listed": listed.predict([rows, 10 * rows], BATCH, verbose=0),
            "several": several.predict(both, BATCH, verbose=0),
        }


def predict_steps_per_execution(strategy: Any) -> dict[str, Any]:
    """Predictions and scores with several steps in one execution."""
    x, y = common.table(77)
    with scope(strategy):
        model = common.dense_model()
        model.compile(
            "sgd", common.sparse_crossentropy(), metrics=["accuracy"], steps_per_execution=2
        )
        return {
            "predict": model.predict(x, BATCH, verbose=0),
            "evaluate": common.numbers(model.evaluate(x, y, BATCH, verbose=0, return_dict=True)),
        }


def on_batch(strategy: Any) -> dict[str, Any]:
    """Trains, tests and predicts by hand, on batches of unequal sizes."""
    x, y = common.table(100)
    weight = np.linspace(0.5, 2.0, 100).astype("float32")
    with scope(strategy):
        model = common.dense_model()
        model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy(), metrics=["accuracy"])
        trained = []
        for start, end in ((0, 32), (32, 45), (45, 46), (46, 100)):
            rows = slice(start, end)
            model.reset_metrics()
            logs = model.train_on_batch(x[rows], y[rows], weight[rows], return_dict=True)
            trained.append(common.numbers(logs))
        listed = model.train_on_batch(x[:32], y[:32], class_weight={0: 1.0, 1: 2.0, 2: 0.5})
        tested = model.test_on_batch(x[:13], y[:13], return_dict=True)
        predicted = model.predict_on_batch(x[:13])
        of_nothing = model.predict_on_batch(x[:0])
    return {
        "of_nothing": np.asarray(of_nothing),
        "trained": trained,
        "listed": [float(v) for v in listed],
        "tested": common.numbers(tested),
        "predicted": np.asarray(predicted),
        "weights": common.weights(model),
    }


def on_batch_lazy(strategy: Any) -> dict[str, Any]:
    """`train_on_batch` on a model that its first batch builds."""
    x, y = common.table(45)
    with scope(strategy):
        model = common.lazy_model()
        model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy())
        # A pipeline's first batch is one that its microbatches divide.
        rows = [slice(n) for n in (44, 45, 45)]
        losses = [float(np.ravel(model.train_on_batch(x[r], y[r]))[0]) for r in rows]
    return {"losses": losses, "weights": common.weights(model)}


def called(strategy: Any) -> dict[str, Any]:
    """The model called as a function, outside of any step."""
    x, _ = common.table(13)
    with scope(strategy):
        model = common.lazy_model()
        return {"outputs": np.asarray(model(x)), "training": np.asarray(model(x, training=True))}


class Traced(keras.layers.Layer):
    """The mean over a dimension; notes each time that it is traced."""

    def __init__(self, noted: list[Any]) -> None:
        super().__init__()
        self._note = noted.append  # Keras would keep a copy of a list

    def call(self, inputs: Any) -> Any:
        """The mean."""
        self._note(inputs.shape)
        return keras.ops.mean(inputs, axis=1)


def lengths(strategy: Any, *, method: str) -> dict[str, Any]:
    """Batches of twelve lengths; how often the model was traced for them."""
    noted: list[Any] = []
    rng = np.random.default_rng(4)
    with scope(strategy):
        model = keras.Sequential([keras.Input((None, 3)), Traced(noted), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        noted.clear()
        results = []
        for length in range(4, 16):
            rows = 9 - length % 3
            x, y = rng.normal(size=(rows, length, 3)), rng.normal(size=(rows, 1))
            x, y = x.astype("float32"), y.astype("float32")
            given = (x,) if method.startswith("predict") else (x, y)
            results.append(np.asarray(getattr(model, method)(*given)))
        weights = common.weights(model)
    return {"results": results, "weights": weights, "traced": len(noted)}


class Summed(keras.Model):
    """A dense layer on the sums of ragged rows."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        """One number for each row."""
        return self.out(tf.cast(tf.reduce_sum(inputs, axis=1), tf.float32)[:, None])


class Padded(keras.Model):
    """A dense layer on means over padded rows, the padding included."""

    def __init__(self, shape: Callable[[Any], Any] = lambda _: None) -> None:
        super().__init__()
        self.shape = shape
        self.embed, self.out = keras.layers.Embedding(9, 3), keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        """One number for each row."""
        return self.out(
            tf.reduce_mean(self.embed(inputs.to_tensor(shape=self.shape(inputs))), axis=1)
        )


def _longest(rows: Any) -> Any:
    """A computed size that stands for the longest row's."""
    return tf.where(tf.size(rows.flat_values) > 1000, 3, -1)


def _as_long(rows: Any) -> Any:
    return rows.to_tensor(shape=tf.cast([-1, 7], tf.int64))


def _averaging_embeddings() -> keras.Model:
    layers = [
        keras.layers.Embedding(9, 3),
        keras.layers.Lambda(lambda rows: tf.reduce_mean(rows, axis=1)),
        keras.layers.Dense(1),
    ]
    return keras.Sequential(layers)


def on_batch_of(strategy: Any, *, kind: str) -> dict[str, Any]:
    """The methods on one batch, with batches that are no dense tensors."""
    rng = np.random.default_rng(7)
    dense = np.where(rng.random((23, 6)) < 0.4, rng.normal(size=(23, 6)), 0).astype("float32")
    y = dense.sum(1, keepdims=True)
    with scope(strategy):
        if kind == "sparse":
            inputs = [tf.sparse.from_dense(dense[:n]) for n in (23, 8, 1)]
            model = keras.Sequential([keras.Input((6,), sparse=True), keras.layers.Dense(1)])
        else:
            counts = rng.integers(kind == "looked up", 6, 23)
            values = rng.integers(0, 9, counts.sum())
            ragged = tf.RaggedTensor.from_row_lengths(values, counts)
            inputs = [ragged[:n] for n in (23, 8, 1)]
            kinds: dict[str, Callable[[], keras.Model]] = {
                "ragged": Summed,
                "looked up": _averaging_embeddings,
                "padded": Padded,
                "padded by a list": lambda: Padded(lambda _: [None, None]),
                "padded by a tensor": lambda: Padded(lambda x: tf.stack([-1, _longest(x)])),
            }
            model = kinds[kind]()
            # Data sets that are made in the scope are padded as ever.
            assert next(iter(tf.data.Dataset.from_tensors(inputs[0]).map(_as_long))).shape[1] == 7
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        trained = [float(np.ravel(model.train_on_batch(x, y[: x.shape[0]]))[0]) for x in inputs]
        tested = [float(np.ravel(model.test_on_batch(x, y[: x.shape[0]]))[0]) for x in inputs]
        predicted = [np.asarray(model.predict_on_batch(x)) for x in inputs]
        found = {"trained": trained, "tested": tested, "predicted": predicted}
        if kind == "padded":
            data = tf.data.Dataset.from_tensor_slices((ragged, y)).batch(5)
            found |= common.fitted(model, data)
            found["whole set"] = model.predict(ragged, batch_size=5, verbose=0)
    return {**found, "weights": common.weights(model)}


def few_rows(strategy: Any) -> dict[str, Any]:
    """Predictions of one to five rows, of models with one and several inputs and outputs."""
    rows = np.random.default_rng(8).normal(size=(5, 4))
    results: dict[str, Any] = {}
    with scope(strategy):
        inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
        hidden = keras.layers.Dense(3)(keras.layers.Add()([inputs["a"], inputs["b"]]))
        normal = keras.layers.BatchNormalization()(hidden)
        named = keras.Model(inputs, {"out": hidden, "pair": [normal, inputs["a"]]})
        stepped, eager = common.lazy_model(), common.lazy_model()
        stepped.compile(steps_per_execution=3)
        eager.compile(run_eagerly=True)
        for count in (1, 2, 5):
            x = rows[:count]
            both = {"a": x, "b": tf.constant(2 * x, tf.float32)}
            results[f"{count}"] = {
                "named": named.predict(both, verbose=0),
                "on batch": named.predict_on_batch({"a": x, "b": -x}),
                "stepped": stepped.predict(x, verbose=0),
                "in batches": stepped.predict(x, batch_size=2, verbose=0),
                "eager": eager.predict(x, verbose=0),
                "eager on batch": np.asarray(eager.predict_on_batch(x)),
            }
    return results


def one_row_on_one_worker(strategy: Any) -> dict[str, Any]:
    """One row predicted on the chief only, and each worker's own row."""
    with scope(strategy):
        model = common.dense_model()
        x = np.full((1, 8), float(strategy.world.worker), "float32")
        alone = []
        if strategy.is_chief:
            alone = [model.predict(x, verbose=0), model.predict_on_batch(x)]
        own = model.predict(x, verbose=0)
        again = model.predict(np.zeros((1, 8), "float32"), verbose=0)
    return {"alone": alone, "own": own, "zeros": again}


def different_values(strategy: Any, *, method: str) -> str:
    """The error of a method that is given other rows on each worker."""
    x = np.full((6, 8), float(strategy.world.worker), "float32")
    y = np.zeros(6, "int32")
    with scope(strategy):
        model = common.dense_model()
        model.compile("sgd", common.sparse_crossentropy())
        before = common.weights(model)
        try:
            getattr(model, method)(*((x,) if method == "predict" else (x, y)))
        except ValueError as error:
            same = [(a == b).all() for a, b in zip(before, common.weights(model), strict=True)]
            return f"{error} {'untrained' if all(same) else 'trained'}"
    return ""


def reset(strategy: Any) -> dict[str, Any]:
    """How often replicas add up when metrics are set to zero, and what metrics then show."""
    x, y = common.table(BATCH + 1)
    with scope(strategy):
        model = common.dense_model()
        model.compile("sgd", common.sparse_crossentropy(), metrics=["accuracy"])
        model.train_on_batch(x, y)
        sums: list[str] = []
        original = strategy.reduce
        strategy.reduce = lambda *args, **kw: sums.append("a sum") or original(*args, **kw)
        try:
            model.reset_metrics()
        finally:
            del strategy.reduce
        shown = [float(np.asarray(variable)) for variable in model.metrics_variables]
        return {"sums": sums, "shown": shown}


class Typed(keras.Sequential):
    """Predicts values of types that collectives do not know."""

    def predict_step(self, data: Any) -> dict[str, Any]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        predicted = self(x, training=False)
        return {
            "bool": predicted > 0,
            "uint8": tf.cast(tf.abs(predicted) * 20, tf.uint8),
            "uint32": tf.cast(tf.abs(predicted) * 1e6, tf.uint32),
            "bfloat16": tf.cast(predicted, tf.bfloat16),
            "complex64": tf.complex(predicted, -predicted),
            "complex128": tf.cast(tf.complex(predicted, -predicted), tf.complex128),
            "string": tf.strings.as_string(tf.cast(predicted * 10, tf.int32)),
        }


def predicted_types(strategy: Any) -> dict[str, Any]:
    """What `predict` and `predict_on_batch` return of each type."""
    x, _ = common.table(43)
    x = np.round(8 * x) / 8  # sums in any order are exact
    with scope(strategy):
        ones = keras.layers.Dense(3, kernel_initializer="ones")
        model = Typed([keras.Input((8,)), ones])
        several = model.predict(x, BATCH, verbose=0)
        single = model.predict_on_batch(x[:5])
    wide = {"bfloat16": "float32"}
    return {
        f"{call} {name}": [value.dtype.name, value.astype(wide.get(name, value.dtype))]
        for call, values in (("several", several), ("single", single))
        for name, value in values.items()
    }


class Resized(keras.Model):
    """Predicts other numbers of rows than it is given: two for each, some, or of no columns."""

    def call(self, inputs: Any) -> dict[str, Any]:
        """Rows of each kind."""
        return {
            "twice": tf.repeat(inputs, 2, axis=0),
            "chosen": tf.boolean_mask(inputs, inputs[:, 0] > 0),
            "strings": tf.strings.as_string(tf.boolean_mask(inputs, inputs[:, 0] > 0)),
            "no columns": inputs[:, :0],
        }


def predicted_rows(strategy: Any, run_eagerly: bool = False) -> dict[str, Any]:
    """What is predicted where the outputs have other numbers of rows than the examples."""
    x, _ = common.table(43)
    x[:, 0] = np.where(np.arange(43) < 20, -1.0, 1.0)  # of the first batch no row is chosen
    with scope(strategy):
        model = Resized()
        model.compile(run_eagerly=run_eagerly)
        found = {} if run_eagerly else {"several": model.predict(x, BATCH, verbose=0)}
        for rows in (x[:9], x[-3:], x[-2:]):
            values = model.predict_on_batch(rows)
            found[str(len(rows))] = tf.nest.map_structure(np.asarray, values)
    return found


_TYPES = (
    *("bool", "int8", "uint16", "int32", "uint32", "int64", "float16", "bfloat16", "float32"),
    *("complex64", "complex128", "string"),
)


def gathered_types(strategy: Any) -> dict[str, list[list[int]]]:
    """The integers that `all_gather` of a replica gives of each type, of two rows and of none."""

    def gather(name: str, rows: Any) -> Any:
        context = tf.distribute.get_replica_context()
        own = tf.range(4)[:rows] + 4 * context.replica_id_in_sync_group
        value = tf.strings.as_string(own) if name == "string" else tf.cast(own, name)
        return context.all_gather(value, axis=0)

    found = {}
    for name in _TYPES:
        for rows in (2, 0):
            step = tf.function(lambda rows, name=name: strategy.run(gather, (name, rows)))
            values = strategy.experimental_local_results(step(tf.constant(rows)))
            found[f"{name} {rows}"] = [[_integer(x) for x in value.numpy()] for value in values]
    return found


def _integer(number: Any) -> int:
    return int(getattr(number, "real", number))


class Returning(keras.Model):
    """Returns the loss of its step, and leaves the metric of that name as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        return {"loss": self.compute_loss(x, y, self(x, training=False))}


def returned_losses(strategy: Any) -> dict[str, Any]:
    """The losses that an own step returns, of batches of several sizes."""
    x, y = common.table(40)
    y = y[:, None].astype("float32")
    with scope(strategy):
        model = Returning()
        model.compile("sgd", "mse")
        sizes = [slice(0, 16), slice(16, 23), slice(23, 40)]
        trained = [model.train_on_batch(x[rows], y[rows]) for rows in sizes]
        tested = [model.test_on_batch(x[rows], y[rows], return_dict=True) for rows in sizes]
    return {"trained": trained, "tested": [common.numbers(each) for each in tested]}
