"""Data cases: who sees which example, for every kind of input that `fit` takes."""

from __future__ import annotations

import gc
import itertools
import math
import pathlib
import random
import sys
import types
import unittest.mock
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import scipy.sparse
import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

import tfdist
from tests.cases import common
from tests.cases.common import scope
from tfdist.errors import EquivalenceWarning
from tfdist.keras import iterators

#: 5 batches of 8 and one of 3.
EXAMPLES, BATCH = 43, 8


class Batches(keras.utils.PyDataset):
    """Batches of `(features, id)`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.x, self.ids = _rows()

    def __len__(self) -> int:
        return math.ceil(EXAMPLES / BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.ids[rows]


def _rows() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(5).normal(size=(EXAMPLES, 4)).astype("float32")
    return x, np.arange(EXAMPLES, dtype="float32")[:, None]


def _generator() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield from (Batches()[i] for i in range(math.ceil(EXAMPLES / BATCH)))


def _unseeded() -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices(_rows())
    return data.shuffle(EXAMPLES).batch(BATCH)


def _with_policy(policy: str) -> tf.data.Dataset:
    options = tf.data.Options()
    kind = tf.data.experimental.AutoShardPolicy[policy]
    options.experimental_distribute.auto_shard_policy = kind
    return tf.data.Dataset.from_tensor_slices(_rows()).batch(BATCH).with_options(options)


def _sources(kind: str) -> dict[str, Any]:
    """The arguments of `fit` for one kind of input."""
    steps = math.ceil(EXAMPLES / BATCH)
    rows = tf.data.Dataset.from_tensor_slices(_rows())
    x, ids = _rows()
    return {
        "arrays": lambda: {"x": x, "y": ids, "batch_size": BATCH, "shuffle": False},
        "arrays_shuffled": lambda: {"x": x, "y": ids, "batch_size": BATCH},
        "arrays_batch_shuffled": lambda: {
            "x": x,
            "y": ids,
            "batch_size": BATCH,
            "shuffle": "batch",
        },
        "tensors": lambda: {
            "x": tf.constant(x),
            "y": tf.constant(ids),
            "batch_size": BATCH,
            "shuffle": False,
        },
        "dataset": lambda: {"x": rows.batch(BATCH)},
        "dataset_cached": lambda: {"x": rows.cache().batch(BATCH).prefetch(2)},
        "dataset_repeated": lambda: {"x": rows.batch(BATCH).repeat(), "steps_per_epoch": steps},
        "dataset_shuffled": lambda: {"x": _unseeded()},
        "dataset_unknown_length": lambda: {"x": rows.filter(lambda *_: True).batch(BATCH)},
        "dataset_data_policy": lambda: {"x": _with_policy("DATA")},
        "generator": lambda: {"x": _generator(), "steps_per_epoch": steps},
        "sequence": lambda: {"x": Batches(), "shuffle": False},
        "sequence_shuffled": lambda: {"x": Batches()},
        "sequence_two_workers": lambda: {"x": Batches(workers=2, max_queue_size=4)},
        "sequence_validation": lambda: {
            "x": Batches(),
            "shuffle": False,
            "validation_data": Batches(),
        },
        "split": lambda: {"x": x, "y": ids, "batch_size": BATCH, "validation_split": 0.3},
    }[kind]()


def _model(examples: int = EXAMPLES, features: int = 4) -> keras.Model:
    layers = [keras.layers.Dense(2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((features,)), *layers])
    model.compile(keras.optimizers.SGD(1e-3), "mse", metrics=[common.SeenOnce(examples)])
    return model


def coverage(strategy: Any, *, kind: str) -> dict[str, Any]:
    """Two epochs over one kind of input; `once` is the share of examples seen exactly once."""
    with scope(strategy):
        model = _model()
        done = common.fitted(model, **_sources(kind))
    return {
        **done,
        "iterations": int(np.asarray(model.optimizer.iterations)),
    }


def passes_that_go_on(strategy: Any, *, seed: int | None) -> dict[str, Any]:
    """Calls of `fit` that share a shuffled and repeated data set, and end within a pass over it.

    Without TensorFlow's own prefetch, by which stock Keras reads ahead as far as time allows.
    """
    keras.utils.set_random_seed(11)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    with scope(strategy):
        model = _model()
        rows = tf.data.Dataset.from_tensor_slices(_rows()).shuffle(EXAMPLES, seed=seed)
        data = rows.repeat().batch(BATCH).with_options(options)
        done = [
            model.fit(data, epochs=2, steps_per_epoch=3, verbose=0),
            model.fit(data, epochs=4, initial_epoch=2, steps_per_epoch=5, verbose=0),
        ]
        score = model.evaluate(data, steps=2, verbose=0, return_dict=True)
        done.append(model.fit(data, steps_per_epoch=1, verbose=0))
    return {
        "history": [common.history(each) for each in done],
        "evaluate": common.numbers(score),
        "weights": common.weights(model),
    }


def shuffles_that_go_on(strategy: Any, *, seed: int | None) -> dict[str, Any]:
    """Calls of `fit` and `evaluate` that share a shuffled data set."""
    keras.utils.set_random_seed(11)
    with scope(strategy):
        model = _model()
        data = tf.data.Dataset.from_tensor_slices(_rows()).shuffle(EXAMPLES, seed=seed).batch(BATCH)
        done = [model.fit(data, epochs=epochs, verbose=0) for epochs in (2, 1)]
        score = model.evaluate(data, verbose=0, return_dict=True)
        done.append(model.fit(data, epochs=2, verbose=0))
    return {
        "history": [common.history(each) for each in done],
        "evaluate": common.numbers(score),
        "weights": common.weights(model),
    }


def remainder_dropped(strategy: Any) -> dict[str, Any]:
    """Batches of static size, the remainder being dropped."""
    rows = tf.data.Dataset.from_tensor_slices(_rows())
    with scope(strategy):
        model = _model()
        done = common.fitted(model, rows.batch(BATCH, drop_remainder=True))
        return {**done, "evaluate": common.score(model, rows.batch(6, drop_remainder=True))}


def files(strategy: Any, *, directory: str, policy: str) -> dict[str, Any]:
    """One epoch over text files of unequal lengths, each holding one id a line."""
    names = sorted(str(path) for path in pathlib.Path(directory).glob("*.txt"))
    total = sum(len(pathlib.Path(name).read_text().split()) for name in names)
    options = tf.data.Options()
    kind = tf.data.experimental.AutoShardPolicy[policy]
    options.experimental_distribute.auto_shard_policy = kind

    def parse(line: Any) -> Any:
        number = tf.reshape(tf.strings.to_number(line), (1,))
        return tf.stack([number[0] / 50.0, 1.0]), number

    data = tf.data.Dataset.from_tensor_slices(names)
    data = data.interleave(tf.data.TextLineDataset, cycle_length=1)
    data = data.map(parse).batch(8).with_options(options)
    with scope(strategy):
        model = _model(total, features=2)
        done = model.fit(data, epochs=2, verbose=0)
        score = model.evaluate(data, verbose=0, return_dict=True)
    return {"history": common.history(done), "evaluate": common.numbers(score)}


def unequal_lengths(strategy: Any, *, kind: str) -> dict[str, Any]:
    """A data set whose length depends on the rank: an error, or the same steps everywhere."""
    rank = 0 if strategy is None else strategy.world.worker
    batches = 5 - 2 * (rank % 2)
    x, ids = _rows()

    def generate() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for i in range(batches):
            yield x[i * BATCH : (i + 1) * BATCH], ids[i * BATCH : (i + 1) * BATCH]

    sources = {
        "generator": generate,
        "dataset": lambda: tf.data.Dataset.from_tensor_slices((x, ids)).batch(BATCH).take(batches),
        "arrays": lambda: tf.data.Dataset.from_tensor_slices(
            (x[: batches * BATCH], ids[: batches * BATCH])
        ).batch(BATCH),
    }
    with scope(strategy):
        model = _model()
        try:
            model.fit(sources[kind](), epochs=1, verbose=0)
        except (tfdist.TfdistError, tf.errors.InvalidArgumentError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {"steps": int(np.asarray(model.optimizer.iterations))}


def strings(strategy: Any) -> dict[str, Any]:
    """String and ragged features, looked up inside the model."""
    layers = keras.layers
    words = np.array(["cat", "dog", "owl", "eel", "bat"])
    rng = np.random.default_rng(6)
    features = {"animal": words[rng.integers(0, 5, EXAMPLES)][:, None]}
    y = (features["animal"] == "dog").astype("float32")
    data = tf.data.Dataset.from_tensor_slices((features, y)).batch(BATCH)
    with scope(strategy):
        lookup = layers.StringLookup(vocabulary=list(words), output_mode="one_hot")
        inputs = {"animal": keras.Input((1,), dtype="string", name="animal")}
        outputs = layers.Dense(1, "sigmoid")(lookup(inputs["animal"]))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=["accuracy"])
        done = model.fit(data, epochs=3, verbose=0)
        predicted = model.predict(data, verbose=0)
    return {
        "history": common.history(done),
        "weights": [w for w in common.weights(model) if w.dtype.kind == "f"],
        "predict": predicted,
    }


def _draw() -> None:
    """Draws from every generator of random numbers that a program may use."""
    tf.random.normal([3])
    np.random.rand(7)
    random.random()


def _drawn(kind: str) -> dict[str, Any]:
    """Arguments of `fit` whose order comes from random numbers."""
    x, ids = _rows()
    rows = tf.data.Dataset.from_tensor_slices((x, ids))

    def generate() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            order = np.random.permutation(EXAMPLES)
            for start in range(0, EXAMPLES, BATCH):
                yield x[order[start : start + BATCH]], ids[order[start : start + BATCH]]

    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return {
        "arrays": lambda: {"x": x, "y": ids, "batch_size": BATCH},
        "sequence": lambda: {"x": Batches()},
        "sequence_two_workers": lambda: {"x": Batches(workers=2, max_queue_size=4)},
        "seeded": lambda: {"x": rows.shuffle(EXAMPLES, seed=3).batch(BATCH)},
        "dataset": lambda: {"x": rows.shuffle(EXAMPLES).batch(BATCH)},
        "dataset_repeated": lambda: {
            "x": rows.shuffle(EXAMPLES).batch(BATCH).repeat(),
            "steps_per_epoch": 6,
        },
        "dataset_unknown_length": lambda: {
            "x": rows.shuffle(EXAMPLES).filter(lambda *_: True).batch(BATCH)
        },
        "dataset_policy_off": lambda: {"x": rows.shuffle(EXAMPLES).batch(BATCH).with_options(off)},
        "generator": lambda: {"x": generate(), "steps_per_epoch": 6},
    }[kind]()


def one_draws_more(strategy: Any, *, kind: str) -> dict[str, Any]:
    """Two epochs in a program of which one worker has drawn more random numbers than another."""
    with scope(strategy):
        model = _model()
        if strategy.is_chief:
            _draw()
        try:
            return common.fitted(model, **_drawn(kind))
        except Exception as error:
            steps = int(np.asarray(model.optimizer.iterations))
            return {"error": f"{type(error).__name__}: {error}", "steps": steps}


def made_on_one(strategy: Any, *, kind: str) -> None:
    """A layer, or the generator of Keras's random numbers, that one worker alone makes."""
    with scope(strategy):
        if strategy.is_chief:
            if kind == "layer":
                keras.layers.Dense(7).build((None, 5))
            else:
                keras.random.uniform((2,))
        common.fitted(_model(), **_drawn("seeded"))


class _DrawsOnChief(keras.callbacks.Callback):
    """Draws a random number on one worker after each epoch, as for a picture."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self._here = strategy.is_chief

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Draws."""
        if self._here:
            _draw()


class _Permuted(Batches):
    """Permutes its rows before each epoch, by NumPy's generator."""

    def on_epoch_begin(self) -> None:
        """Permutes."""
        order = np.random.permutation(EXAMPLES)
        self.x, self.ids = self.x[order], self.ids[order]


def one_draws_between_epochs(strategy: Any) -> dict[str, Any]:
    """The error, and the epochs trained, where the workers' batches differ from the second on."""
    with scope(strategy):
        model = _model()
        history = keras.callbacks.History()
        try:
            callbacks = [_DrawsOnChief(strategy), history]
            model.fit(_Permuted(), epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "epochs": len(history.epoch)}
    return {}


def one_fails_to_read(strategy: Any, *, worker: int) -> str:
    """The error where the data set of one worker fails before its first batch."""
    x, ids = _rows()

    def generate() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if strategy.world.worker == worker:
            raise FileNotFoundError("no such file")
        yield x[:BATCH], ids[:BATCH]

    specs = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
    with scope(strategy):
        try:
            model = _model()
            model.fit(tf.data.Dataset.from_generator(generate, output_signature=specs), verbose=0)
        except Exception as error:
            return str(error)
    return ""


class _Rows(NamedTuple):
    """A batch as a namedtuple."""

    x: Any
    y: Any


def namedtuples(strategy: Any) -> dict[str, Any]:
    """Batches that are namedtuples, and features that are."""
    rows = tf.data.Dataset.from_tensor_slices(_rows()).batch(BATCH)
    with scope(strategy):
        model = _model()
        done = common.fitted(model, rows.map(_Rows))
        score = common.score(model, rows.map(_Rows))
        predicted = model.predict(rows.map(_Rows), verbose=0)
    return {**done, "evaluate": score, "predict": predicted}


def sparse_matrices(strategy: Any) -> dict[str, Any]:
    """SciPy's sparse matrices, into a model that its first batch builds."""
    x, ids = _rows()
    matrix = scipy.sparse.csr_matrix(np.where(x > 0, x, 0))
    with scope(strategy):
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-3), "mse", metrics=[common.SeenOnce(EXAMPLES)])
        done = common.fitted(model, matrix, ids)
        return {**done, "predict": model.predict(matrix, batch_size=BATCH, verbose=0)}


def sparse_rows(strategy: Any) -> dict[str, Any]:
    """Sparse batches, whose gradient has each row once; Adam squares rows one by one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 8)).astype("float32")
    y = rng.normal(size=(EXAMPLES, 1)).astype("float32")
    sparse = tf.sparse.from_dense(x * (rng.random(x.shape) < 0.3))
    data = tf.data.Dataset.from_tensor_slices((sparse, y)).batch(BATCH)
    with scope(strategy):
        given = keras.Input((8,), sparse=True)
        model = keras.Model(given, keras.layers.Dense(1)(given))
        model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), "mse")
        return common.fitted(model, data)


class LookedUpTwice(keras.layers.Layer):
    """Reads rows of a table for each id, and once for each that the batch has."""

    def build(self, shape: Any) -> None:
        del shape
        self.table = self.add_weight(shape=(6, 4), initializer="glorot_uniform", name="table")

    def call(self, ids: Any) -> Any:
        table = tf.convert_to_tensor(self.table)
        each, (unique, places) = tf.gather(table, ids), tf.unique(tf.reshape(ids, [-1]))
        once = tf.gather(tf.gather(table, unique), tf.reshape(places, tf.shape(ids)))
        return tf.reduce_mean(each * (1.0 + once), axis=1)


def looked_up_twice(strategy: Any) -> dict[str, Any]:
    """A table whose gradient has some rows as often as they are looked up, and others once."""
    rng = np.random.default_rng(0)
    ids, y = rng.integers(0, 6, (EXAMPLES, 5)), rng.normal(size=(EXAMPLES, 1)).astype("float32")
    with scope(strategy):
        model = keras.Sequential(
            [keras.Input((5,), dtype="int32"), LookedUpTwice(), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), "mse")
        return common.fitted(model, ids, y)


class Bag(keras.layers.Layer):
    """The means of a table's rows, of as many ids as each example has."""

    def build(self, shape: Any) -> None:
        del shape
        self.table = self.add_weight(shape=(6, 4), initializer="glorot_uniform", name="table")

    def call(self, ids: Any) -> Any:
        table = tf.convert_to_tensor(self.table)
        return tf.nn.safe_embedding_lookup_sparse(table, tf.sparse.from_dense(ids))


def bags(strategy: Any, *, optimizer: str) -> dict[str, Any]:
    """A table whose gradient has each row of the batch once, as TensorFlow's own op gives it."""
    rng = np.random.default_rng(0)
    ids, y = rng.integers(0, 6, (EXAMPLES, 3)), rng.normal(size=(EXAMPLES, 1)).astype("float32")
    kind = getattr(keras.optimizers, optimizer)
    with scope(strategy):
        model = keras.Sequential([keras.Input((3,), dtype="int32"), Bag(), keras.layers.Dense(1)])
        model.compile(kind(0.02, epsilon=1e-3), "mse")
        return common.fitted(model, ids, y)


def validating_generator(strategy: Any) -> list[float]:
    """The validation losses of three epochs: means over the numbers of the batches."""
    x, _ = common.table(BATCH)

    def numbered() -> Iterator[Any]:
        for number in itertools.count():
            yield x, np.full((BATCH, 1), number, "float32")

    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", lambda y, predicted: y + 0.0 * predicted)
        done = model.fit(
            *(x, x[:, :1], BATCH, 3),
            validation_data=numbered(),
            validation_steps=3,
            verbose=0,
        )
    return [float(value) for value in done.history["val_loss"]]


def freed_by_thread(strategy: Any, *, epochs: int) -> dict[str, int]:
    """Fits; counts the resources of iterators that are kept for the thread, and held elsewhere.

    A resource that something else holds too would be destroyed there, where TensorFlow may sleep.
    """
    x, _ = _rows()
    taken: list[object] = []
    thread = types.SimpleNamespace(put=lambda last: taken.append(last.resource))
    with unittest.mock.patch.object(iterators, "_last_references", return_value=thread):
        with scope(strategy):
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(x, x[:, :1], batch_size=BATCH, epochs=epochs, verbose=0)
        gc.collect()
    alone = sys.getrefcount(object())
    held = [sys.getrefcount(taken[at]) for at in range(len(taken))]
    return {"taken": len(taken), "held": sum(count > alone + 1 for count in held)}


def iterators_made(strategy: Any, *, epochs: int, shuffled: bool) -> int:
    """Fits to arrays, or to a shuffled data set; counts the iterators that TensorFlow makes."""
    x, _ = _rows()
    data: Any = {"x": x, "y": x[:, :1], "batch_size": BATCH}
    if shuffled:
        rows = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
        data = {"x": rows.shuffle(EXAMPLES, seed=1).batch(BATCH)}
    made: list[object] = []
    create = iterator_ops.OwnedIterator._create_iterator

    def counted(self: Any, dataset: Any) -> None:
        made.append(dataset)
        create(self, dataset)

    with (
        unittest.mock.patch.object(iterator_ops.OwnedIterator, "_create_iterator", counted),
        scope(strategy),
    ):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(**data, epochs=epochs, verbose=0)
    return len(made)


def passes_shared(strategy: Any, *, how: str) -> dict[str, Any]:
    """Passes over one shuffle that different data sets, calls and loops begin.

    Args:
        strategy: what to train on.
        how: "steps" limits each call; "split" trains on one part and validates on the other;
            "looked at" reads batches in loops of the program's own.
    """
    keras.utils.set_random_seed(11)
    with scope(strategy):
        model = _model()
        rows = tf.data.Dataset.from_tensor_slices(_rows())
        if how == "steps":
            data = rows.repeat().shuffle(EXAMPLES, seed=3).batch(BATCH)
            done = [model.fit(data, steps_per_epoch=3, epochs=2, verbose=0)]
            scores = [model.evaluate(data, steps=2, verbose=0, return_dict=True) for _ in range(2)]
            steps = {"validation_data": data, "validation_steps": 2, "steps_per_epoch": 3}
            done.append(model.fit(data, epochs=2, verbose=0, **steps))
        elif how == "split":
            data = rows.shuffle(EXAMPLES, seed=3)
            train, rest = data.skip(20).batch(BATCH), data.take(20).batch(BATCH)
            done = [model.fit(train, validation_data=rest, epochs=3, verbose=0)]
            scores = [model.evaluate(rest, verbose=0, return_dict=True)]
        else:
            data = rows.shuffle(EXAMPLES, seed=3).batch(BATCH)
            seen = [next(iter(data))[0].numpy().sum(), *(x.numpy().sum() for x, _ in data.take(1))]
            done = [model.fit(data, epochs=2, verbose=0)]
            seen += [x.numpy().sum() for x, _ in data.map(lambda x, y: (x, y))]
            done.append(model.fit(data, epochs=2, verbose=0))
            scores = [{"seen": float(value)} for value in seen]
    return {
        "history": [common.history(each) for each in done],
        "scores": [common.numbers(each) for each in scores],
        "weights": common.weights(model),
    }


def repeated_shuffle(strategy: Any) -> list[str]:
    """What is named of a second pass over a data set that repeats a shuffle."""
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EquivalenceWarning)
        model = _model()
        data = tf.data.Dataset.from_tensor_slices(_rows()).shuffle(EXAMPLES, seed=3).repeat()
        for _ in range(2):
            model.fit(data.batch(BATCH), steps_per_epoch=7, verbose=0)
    return [str(each.message) for each in caught if each.category is EquivalenceWarning]
