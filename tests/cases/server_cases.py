"""What only parameter servers do: update rules, lost workers, coordinators, tables in parts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.cases import common
from tests.harness import servers as harness_servers
from tfdist.config.server_options import ServerOptions
from tfdist.strategies.parameter_server.servers import parts_of

EXAMPLES, BATCH = 240, 4


@contextlib.contextmanager
def ruled(strategy: Any, **rule: Any) -> Iterator[None]:
    """Trains by another update rule in the block."""
    before = strategy.servers.rule
    strategy.serving.use(ServerOptions(**rule))
    try:
        yield
    finally:
        strategy.serving.use(before)


class Counter(keras.Model):
    """Its weights count: each example adds 1 to the weight of its own number, whatever they are."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.pause = pause
        self.counts = self.add_weight(shape=(EXAMPLES, 1), initializer="zeros", name="counts")
        self.seen = keras.metrics.Sum(name="seen")

    def train_step(self, data: Any) -> Any:
        """Gradient -1 for each example's weight."""
        (ids,) = data if isinstance(data, tuple) else (data,)
        work = self._work()
        with tf.GradientTape() as tape:
            hot = tf.one_hot(ids, EXAMPLES)
            loss = -tf.reduce_sum(tf.matmul(hot, self.counts)) + 0.0 * work
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        self.seen.update_state(tf.ones_like(ids, tf.float32))
        return {"seen": self.seen.result()}

    def _work(self) -> Any:
        """Something that takes time, so that steps overlap."""
        square = tf.random.stateless_uniform([96, 96], [1, 2])
        times = int(self.pause * 1000)
        return tf.reduce_sum(
            tf.while_loop(
                lambda i, x: i < times, lambda i, x: (i + 1, tf.tanh(x @ x)), (0, square)
            )[1]
        )

    @property
    def metrics(self) -> list[Any]:
        """The one metric."""
        return [self.seen]


def counting(
    strategy: Any,
    *,
    rule: dict[str, Any],
    kill: list[int] = (),  # type: ignore[assignment]
    slow: bool = False,
    source: str = "arrays",
    epochs: int = 2,
    pause: float = 0.0,
    until: str = "",
) -> dict[str, Any]:
    """Counts how often each example was applied, with workers that are killed or slowed.

    Training ends after an epoch in which the log of the name `until` is not zero.
    """
    ids = np.arange(EXAMPLES)
    data: Any = {"x": ids, "batch_size": 5 * BATCH if slow else BATCH}
    if source == "dataset":
        data = {"x": tf.data.Dataset.from_tensor_slices(ids).shuffle(EXAMPLES).batch(BATCH)}
    if source == "generator":
        data = {"x": _generated(ids), "steps_per_epoch": EXAMPLES // BATCH}
    with ruled(strategy, **rule), strategy.scope():
        if source == "function":
            data = {"x": strategy.distribute_datasets_from_function(_own_files(ids))}
        model = Counter(pause)
        model.compile(keras.optimizers.SGD(1.0))
        slowing = _Slow(slow)
        with _killing(kill) as killed:
            try:
                done = model.fit(
                    **data, epochs=epochs, verbose=0, callbacks=[slowing, _Until(until)]
                )
            finally:
                slowing.end()
        return {
            "counts": np.asarray(model.counts)[:, 0],
            "iterations": int(model.optimizer.iterations),
            "killed": killed,
            "history": common.history(done),
            "staleness": [each.staleness for each in strategy.epochs],
            "steps": [list(each.steps.values()) for each in strategy.epochs],
        }


def _own_files(ids: np.ndarray) -> Any:
    def make(context: Any) -> Any:
        count, own = context.num_input_pipelines, context.input_pipeline_id
        return tf.data.Dataset.from_tensor_slices(ids).shard(count, own).batch(BATCH)

    return make


def _with_dropout() -> keras.Model:
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
    )


def _of_many_lengths() -> keras.Model:
    return keras.Sequential(
        [keras.Input((None, 8)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    )


def shared_out(strategy: Any, *, kind: str) -> list[str]:
    """What the strategy says of ordinary steps in `sync`; nothing, if all workers compute them."""
    x, y = common.table(48)
    with ruled(strategy, mode="sync"), strategy.scope():
        strategy.serving._reported.clear()
        model = _of_many_lengths() if kind == "lengths" else _with_dropout()
        model.compile("sgd", "mse", metrics=["mae"])
        if kind == "arrays":
            model.fit(x, y, 16, 2, verbose=0)
        elif kind == "generator":
            batches = ((x[i : i + 16], y[i : i + 16]) for i in range(0, 48, 16))
            model.fit(batches, steps_per_epoch=3, verbose=0)
        elif kind == "lengths":
            for length in (3, 4, 5):
                model.train_on_batch(np.tile(x[:, None], [1, length, 1]), y)
        elif kind == "weighted":
            model.train_on_batch(x, y, sample_weight=np.arange(48.0))
        return sorted(text for text in strategy.serving._reported if "one worker" in text)


def _generated(ids: np.ndarray) -> Iterator[Any]:
    while True:
        for start in range(0, len(ids), BATCH):
            yield (ids[start : start + BATCH],)


@contextlib.contextmanager
def _killing(workers: list[int]) -> Iterator[list[int]]:
    """Kills workers, one after the other, while the block runs, and starts each again.

    Yields:
        Those that have been killed before the block ended.
    """
    ended = threading.Event()
    killed: list[int] = []

    def kill() -> None:
        for worker in workers:
            if ended.wait(0.4):
                return
            process = harness_servers.running("worker", worker)
            process.kill()
            process.wait()
            if not ended.is_set():
                killed.append(worker)
            harness_servers.start("worker", worker)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


class _Until(keras.callbacks.Callback):
    """Ends training after the epoch in which something has happened."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Looks whether it has."""
        if self._name and logs[self._name]:
            self.model.stop_training = True


class _Slow(keras.callbacks.Callback):
    """Stops worker 0 most of the time, from the second batch on: set-up asks all workers often.

    Another process does it: this one may wait for the worker while it is stopped.
    """

    def __init__(self, active: bool) -> None:
        super().__init__()
        self._active = active
        self._process: subprocess.Popen[bytes] | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Starts to slow the worker."""
        if self._active and batch >= 1 and self._process is None:
            stopped = harness_servers.running("worker", 0).pid
            text = f"kill -STOP {stopped}; sleep 0.04; kill -CONT {stopped}; sleep 0.02"
            self._process = subprocess.Popen(["sh", "-c", f"while :; do {text}; done"])

    def end(self) -> None:
        """Lets the worker run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.kill(harness_servers.running("worker", 0).pid, signal.SIGCONT)


def table(strategy: Any) -> dict[str, Any]:
    """Trains an embedding that is split over the servers and looked up there."""
    x, y = common.tokens(77, vocabulary=300)
    with common.scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(300, 16),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), common.sparse_crossentropy())
        done = common.fitted(model, x, y, batch_size=16)
        parts = 1
        if strategy is not None:
            parts = len(model.layers[0]._embeddings._value.variables)
    return {"result": done, "parts": parts}


def coordinated(strategy: Any) -> dict[str, Any]:
    """A loop written by hand for TensorFlow's coordinator."""
    x, y = common.table(64)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = common.dense_model()
        optimizer = keras.optimizers.Adam(0.01)
        loss_object = common.sparse_crossentropy()
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def make() -> Any:
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8)

    iterator = iter(coordinator.create_per_worker_dataset(make))

    @tf.function
    def step(batches: Any) -> Any:
        def replica(batch: Any) -> Any:
            features, labels = batch
            with tf.GradientTape() as tape:
                logits = model(features, training=True)
                loss = loss_object(labels, logits)
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            accuracy.update_state(labels, logits)
            return loss

        return strategy.run(replica, args=(next(batches),))

    with strategy.scope():
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(60)]
        coordinator.join()
        values = coordinator.fetch(losses)
    return {
        "iterations": int(optimizer.iterations),
        "counted": float(np.asarray(accuracy.count)),
        "losses": [float(value) for value in values],
    }


def not_a_number(strategy: Any, *, of: str) -> str:
    """Trains with a loss or a metric that is NaN, and returns the error."""
    x, y = common.table(40)

    def undefined(true: Any, predicted: Any) -> Any:
        return tf.reduce_mean(predicted) * float("nan")

    with strategy.scope():
        model = common.dense_model()
        if of == "loss":
            model.compile("sgd", undefined)
        else:
            model.compile("sgd", common.sparse_crossentropy(), metrics=[undefined])
        try:
            model.fit(x, y, 8, 1, verbose=0)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def beside(strategy: Any) -> list[tuple[list[str], list[str]]]:
    """Where each weight is, and where its optimizer state is."""
    x, y = common.table(16)
    with strategy.scope():
        model = common.lazy_model()
        model.compile(keras.optimizers.Adam(), common.sparse_crossentropy())
        model.fit(x, y, 8, 1, verbose=0)
    optimizer, pairs = model.optimizer, []
    for kind in (optimizer._momentums, optimizer._velocities):
        for weight, state in zip(model.trainable_variables, kind, strict=True):
            pairs.append((_devices(weight), _devices(state)))
    return pairs


def _devices(variable: Any) -> list[str]:
    return [part.device for part in parts_of(variable)]


def wired(strategy: Any) -> dict[str, Any]:
    """Trains with float32 and with bfloat16 on the wire."""
    x, y = common.table(64)
    results: dict[str, Any] = {}
    for name, wire in (("wide", None), ("narrow", tf.bfloat16)):
        strategy.servers.wire = wire
        try:
            with strategy.scope():
                keras.utils.set_random_seed(1)
                model = common.dense_model()
                model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy())
                model.fit(x, y, 16, 2, shuffle=False, verbose=0)
                results[name] = np.concatenate([w.ravel() for w in common.weights(model)])
        finally:
            strategy.servers.wire = None
    results["dtypes"] = sorted({str(w.dtype) for w in model.weights})
    [traced] = model.train_function._traced.values()
    results["wire_types"] = sorted(_sent_types(traced.function.graph))
    return results


def _sent_types(graph: Any) -> set[str]:
    """Types of the floating-point tensors of weights' size that go from one task to another."""
    types = set()
    for op in graph.get_operations():
        if op.type in ("If", "StatelessIf"):  # its inputs stay where they are
            continue
        for tensor in op.inputs:
            if op.device and tensor.op.device and op.device == tensor.op.device:
                continue
            big = tensor.shape.is_fully_defined() and tensor.shape.num_elements() >= 24
            if big and tensor.dtype.is_floating and ("ps" in op.device or "ps" in tensor.op.device):
                types.add(tensor.dtype.name)
    return types


def reported(strategy: Any, *, path: str) -> dict[str, Any]:
    """What TensorBoard gets, and the files of a checkpoint in mid-epoch."""
    x, y = common.table(160)
    with ruled(strategy, mode="async"), strategy.scope():
        model = common.dense_model()
        model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy())
        callbacks = [
            keras.callbacks.TensorBoard(path),
            keras.callbacks.ModelCheckpoint(f"{path}/at-{{batch}}.keras", save_freq=10),
        ]
        model.fit(x, y, 8, 1, verbose=0, callbacks=callbacks)
    events = EventAccumulator(f"{path}/train", size_guidance={"tensors": 0})
    events.Reload()
    saved = keras.models.load_model(f"{path}/at-10.keras")
    return {"tags": events.Tags()["tensors"], "iterations": int(saved.optimizer.iterations)}


def loop_between(strategy: Any) -> list[list[float]]:
    """The weights after each of: a training step of Keras, a loop by hand, a step of Keras."""
    with common.scope(strategy):
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x, y = np.ones((4, 2), "float32"), np.zeros((4, 1), "float32")

        @tf.function
        def by_hand() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            variables = model.trainable_variables
            model.optimizer.apply_gradients(
                zip(tape.gradient(loss, variables), variables, strict=True)
            )

        weights = []
        for step in (model.train_on_batch, lambda *_: by_hand(), model.train_on_batch):
            step(x, y)
            weights.append([float(w) for array in model.get_weights() for w in np.ravel(array)])
        return weights


def after_an_error(strategy: Any, *, mode: str) -> dict[str, Any]:
    """A training whose step fails, and one after it."""
    ids = np.arange(EXAMPLES)
    with ruled(strategy, mode=mode), strategy.scope():
        model = Counter()
        model.compile(keras.optimizers.SGD(1.0))
        bad = tf.data.Dataset.from_tensor_slices(ids).batch(BATCH).map(_failing)
        try:
            model.fit(bad, epochs=1, verbose=0)
        except tf.errors.InvalidArgumentError as raised:
            error = str(raised)
        before = np.asarray(model.counts)[:, 0].copy()
        model.fit(ids, batch_size=BATCH, epochs=1, verbose=0)
        return {"error": error, "counts": np.asarray(model.counts)[:, 0] - before}


def _failing(ids: Any) -> Any:
    whole = tf.debugging.assert_less(ids, tf.constant(58, ids.dtype), "an example is broken")
    with tf.control_dependencies([whole]):
        return tf.identity(ids)
