"""Update modes, and a single process that simulates what several replicas should train."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common, scaling_cases, step_cases
from tests.cases.common import BATCH, scope
from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.errors import EquivalenceWarning

REPLICAS = 2


@contextlib.contextmanager
def ruled(strategy: Any, rule: dict[str, Any]) -> Iterator[None]:
    """The strategy with another rule in the block."""
    strategy.rule = GradientOptions(**rule)
    try:
        yield
    finally:
        strategy.rule = PLAIN


def own_step(strategy: Any, *, kind: str, rule: dict[str, Any]) -> dict[str, Any]:
    """A model with its own `train_step`, and whether the step was named; see `step_cases`."""
    entered = contextlib.nullcontext() if strategy is None else ruled(strategy, rule)
    with entered, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = step_cases.own_step(strategy, kind=kind)
    said = [str(each.message) for each in caught if each.category is EquivalenceWarning]
    return {**result, "named": any("each replica does so with its own" in each for each in said)}


def halves(strategy: Any, *, rule: dict[str, Any]) -> Any:
    """Trains in mixed_float16 with gradients that overflow when those of replicas are added."""
    with contextlib.nullcontext() if strategy is None else ruled(strategy, rule):
        return scaling_cases.half(strategy, large=30.0)


def make(model: str, optimizer: str, options: dict[str, Any]) -> Any:
    """A model with its optimizer, and data for it."""
    keras.utils.set_random_seed(5)
    makers = {
        "dense": common.dense_model,
        "normalized": normalized_model,
        "embedding": embedding_model,
        "product": product_model,
    }
    made = makers[model]()
    kinds = {
        "sgd": lambda: keras.optimizers.SGD(**{"learning_rate": 0.1, **options}),
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, **options),
        "adam": lambda: keras.optimizers.Adam(0.01, **options),
    }
    return made, kinds[optimizer]()


def normalized_model() -> keras.Model:
    """A model with weights that are not trained: moving averages."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16),
            layers.BatchNormalization(momentum=0.8),
            layers.ReLU(),
            layers.Dense(3),
        ]
    )


def embedding_model() -> keras.Model:
    """A model whose first gradients are sparse."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,)), layers.Embedding(20, 8), layers.Flatten(), layers.Dense(3)]
    )


class Product(keras.layers.Layer):
    """A product whose gradient has no static shape: the matrix is broadcast over a batch."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(20, 8))

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(keras.ops.one_hot(x, 20), self.kernel)


def product_model() -> keras.Model:
    """A model with an embedding by a product."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,), dtype="int32"), Product(), layers.Flatten(), layers.Dense(3)]
    )


def data_for(model: str, examples: int) -> Any:
    """Features and labels for a model of `make`."""
    return common.tokens(examples) if model in ("embedding", "product") else common.table(examples)


def train(
    strategy: Any,
    rule: dict[str, Any],
    model: str = "dense",
    optimizer: str = "sgd",
    examples: int = 96,
    epochs: int = 2,
    options: dict[str, Any] | None = None,
    validate: bool = False,
    eager: bool = False,
) -> dict[str, Any]:
    """`fit` under a rule, or without a strategy its simulation in one process."""
    x, y = data_for(model, examples)
    if strategy is None:
        made, using = make(model, optimizer, options or {})
        return Simulation(GradientOptions(**rule), made, using, validate=validate).fit(x, y, epochs)
    with ruled(strategy, rule), scope(strategy):
        made, using = make(model, optimizer, options or {})
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(using, loss, run_eagerly=eager)
        more = {"validation_data": (x, y), "validation_batch_size": 64} if validate else {}
        history = made.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **more)
        return {
            "loss": history.history["loss"],
            "weights": made.get_weights(),
            "iterations": int(using.iterations),
        }


@dataclasses.dataclass
class Replica:
    """A model, its optimizer, and what it has seen since the last average."""

    model: Any
    optimizer: Any
    share: float = 0.0


class Simulation:
    """What `train` should come to, by loops over batches and replicas in one process."""

    def __init__(
        self, rule: GradientOptions, model: Any, optimizer: Any, *, validate: bool
    ) -> None:
        self.rule = rule
        self.validate = validate
        count = REPLICAS if rule.mode == "local" else 1
        self.replicas = [Replica(model, optimizer)]
        for _ in range(count - 1):
            copy = keras.models.clone_model(model)
            copy.set_weights(model.get_weights())
            kind = type(optimizer).from_config(optimizer.get_config())
            self.replicas.append(Replica(copy, kind))
        self.late: deque[Any] = deque()
        self.sums: Any = None
        self.batches, self.examples = 0, 0
        self.synchronous, self.taken = 0, 0
        self.before = [w.numpy() for w in model.trainable_weights]
        self.momentum = [np.zeros_like(w) for w in self.before]

    def fit(self, x: Any, y: Any, epochs: int) -> dict[str, Any]:
        losses = []
        for _ in range(epochs):
            total = 0.0
            for begin in range(0, len(x), BATCH):
                total += self.batch(x[begin : begin + BATCH], y[begin : begin + BATCH])
            losses.append(total / len(x))
            self.end_of_epoch()
        self.flush()
        first = self.replicas[0]
        return {
            "loss": losses,
            "weights": first.model.get_weights(),
            "iterations": int(first.optimizer.iterations),
        }

    def batch(self, x: Any, y: Any) -> float:
        """Takes a batch; returns the sum of its losses."""
        if self.rule.mode == "local" and self.synchronous >= self.rule.sync_steps:
            return self.local(x, y)
        loss, grads = self.gradients(self.replicas[0].model, x, y)
        weighed = [np.asarray(g) * len(x) for g in grads]
        if self.sums is None:
            self.sums = weighed
        else:
            self.sums = [s + g for s, g in zip(self.sums, weighed, strict=True)]
        self.batches += 1
        self.examples += len(x)
        if self.batches >= self.rule.accumulate:
            self.update()
        return loss * len(x)

    def update(self) -> None:
        """Makes an update of the accumulated gradients, now or late."""
        self.late.append([s / self.examples for s in self.sums])
        self.sums, self.batches, self.examples = None, 0, 0
        while len(self.late) > self.rule.delay:
            self.apply(self.late.popleft())

    def apply(self, grads: Any) -> None:
        for replica in self.replicas:
            weights = replica.model.trainable_variables
            factor = 1 / self.rule.delay if self.rule.damp and self.rule.delay else 1
            rate = float(replica.optimizer.learning_rate)
            replica.optimizer.learning_rate = rate * factor
            replica.optimizer.apply([tf.constant(g) for g in grads], weights)
            replica.optimizer.learning_rate = rate
        self.synchronous += 1

    def local(self, x: Any, y: Any) -> float:
        """Each replica takes a step on its slice, or adds its gradients up for one."""
        assert self.rule.accumulate == 1, "not simulated"
        if self.taken == 0:
            model = self.replicas[0].model
            self.before = [w.numpy() for w in model.trainable_weights]
        total = 0.0
        slices = zip(np.array_split(x, REPLICAS), np.array_split(y, REPLICAS), strict=True)
        for replica, (own_x, own_y) in zip(self.replicas, slices, strict=True):
            loss, grads = self.gradients(replica.model, own_x, own_y)
            replica.optimizer.apply(grads, replica.model.trainable_variables)
            replica.share += len(own_x) / len(x)
            total += loss * len(own_x)
        self.taken += 1
        if self.taken == self.rule.period:
            self.average()
        return total

    def average(self) -> None:
        shares = [replica.share / self.taken for replica in self.replicas]
        models = [replica.model for replica in self.replicas]
        mean = [
            sum(p * w.numpy() for p, w in zip(shares, each, strict=True))
            for each in zip(*(m.trainable_weights for m in models), strict=True)
        ]
        rest = [
            sum(p * w.numpy() for p, w in zip(shares, each, strict=True))
            for each in zip(*(m.non_trainable_weights for m in models), strict=True)
        ]
        changes = [b - m for b, m in zip(self.before, mean, strict=True)]
        mu = self.rule.outer_momentum
        self.momentum = [mu * v + c for v, c in zip(self.momentum, changes, strict=True)]
        moved = [c + mu * v for c, v in zip(changes, self.momentum, strict=True)] if mu else changes
        new = [b - self.rule.outer_lr * m for b, m in zip(self.before, moved, strict=True)]
        for model in models:
            for weight, value in zip(model.trainable_weights, new, strict=True):
                weight.assign(value)
            for weight, value in zip(model.non_trainable_weights, rest, strict=True):
                if weight.dtype == "float32":
                    weight.assign(value)
        if self.rule.average_state:
            self.average_states(shares)
        for replica in self.replicas:
            replica.share = 0.0
        self.taken = 0

    def average_states(self, shares: list[float]) -> None:
        states = [replica.optimizer.variables for replica in self.replicas]
        for each in zip(*states, strict=True):
            if each[0].dtype == "float32":
                mean = sum(p * v.numpy() for p, v in zip(shares, each, strict=True))
                for variable in each:
                    variable.assign(mean)

    def end_of_epoch(self) -> None:
        if self.batches:
            self.update()
        if self.rule.mode == "local" or self.validate:
            self.flush()

    def flush(self) -> None:
        while self.late:
            self.apply(self.late.popleft())
        if self.taken:
            self.average()

    @staticmethod
    def gradients(model: Any, x: Any, y: Any) -> tuple[float, Any]:
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        return float(loss), [tf.convert_to_tensor(grad) for grad in grads]


def large_batch(strategy: Any, accumulate: int, optimizer: str = "adam") -> dict[str, Any]:
    """Accumulated batches, or without a strategy one large batch."""
    x, y = common.table(400)
    factor = accumulate if strategy is None else 1
    rule = {"accumulate": accumulate}
    with contextlib.nullcontext() if strategy is None else ruled(strategy, rule), scope(strategy):
        made, using = make("dense", optimizer, {"global_clipnorm": 0.5})
        made.compile(using, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        arguments = {"shuffle": False, "verbose": 0, "validation_data": (x, y)}
        history = made.fit(x, y, batch_size=BATCH * factor, epochs=3, **arguments)
        return {
            "validation": history.history["val_loss"],
            "weights": made.get_weights(),
            "iterations": int(using.iterations),
        }


def resumed(
    strategy: Any, rule: dict[str, Any], directory: str, suffix: str = ".keras"
) -> dict[str, Any]:
    """Trains four epochs at once, and two, saved, loaded and then two more."""
    x, y = common.table(96)
    path = pathlib.Path(directory) / f"model{suffix}"
    with ruled(strategy, rule), scope(strategy):
        arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        whole, using = make("dense", "momentum", {})
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        whole.compile(using, loss)
        whole.fit(x, y, epochs=2, **arguments)
        whole.save(path)
        whole.fit(x, y, epochs=2, **arguments)
        loaded = keras.models.load_model(path)
        loaded.fit(x, y, epochs=2, **arguments)
        kept = vars(loaded.optimizer).get("tfdist_updates")
        return {
            "whole": whole.get_weights(),
            "loaded": loaded.get_weights(),
            "kept": sum(len(e.saved()) for e in kept._exchanges.values()) if kept else 0,
        }


def reported(strategy: Any, rule: dict[str, Any], directory: str) -> dict[str, Any]:
    """Trains with a report; the history's keys and last values, and what TensorBoard was told."""
    x, y = common.table(96)
    place = pathlib.Path(directory) / "board"
    with ruled(strategy, {"report": True, **rule}), scope(strategy):
        made, using = make("dense", "sgd", {})
        made.compile(using, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        board = keras.callbacks.TensorBoard(place)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            history = made.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[board])
    found = b"".join(path.read_bytes() for path in place.rglob("events*"))
    return {
        "history": {name: values[-1] for name, values in history.history.items()},
        "said": said.getvalue(),
        "board": [name for name in history.history if f"epoch_{name}".encode() in found],
    }


def load_other(strategy: Any, first: dict[str, Any], then: dict[str, Any], directory: str) -> str:
    """Saves under one rule and loads under another; the message of the error."""
    x, y = common.table(64)
    path = pathlib.Path(directory) / "other.keras"
    with ruled(strategy, first), scope(strategy):
        made, using = make("dense", "sgd", {})
        made.compile(using, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        made.fit(x, y, batch_size=BATCH, verbose=0)
        made.save(path)
    try:
        with ruled(strategy, then), scope(strategy):
            keras.models.load_model(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _gradients(model: keras.Model, inputs: Any, labels: Any) -> tuple[Any, list[Any]]:
    """The mean loss of a batch, and its gradients of a model's weights."""
    with tf.GradientTape() as tape:
        predicted = model(inputs, training=True)
        loss = tf.reduce_mean(common.sparse_crossentropy()(labels, predicted))
    return loss, tape.gradient(loss, model.trainable_variables)


def held_by(strategy: Any, *, rule: dict[str, Any], where: str) -> list[Any]:
    """The weights after a fit whose `train_step` applies an optimizer that a model holds somewhere.

    Args:
        strategy: the strategy.
        rule: the update rule.
        where: "model.optimizer", or a "list" or "dict" of the model; or a "closure" alone; or a
            "loop" of the program's own, which the model knows nothing of.
    """
    x, y = common.table(BATCH * 5)
    with ruled(strategy, rule), scope(strategy):
        optimizer = keras.optimizers.SGD(0.1)

        class Net(keras.Sequential):
            def train_step(self, data: Any) -> Any:
                loss, grads = _gradients(self, *data)
                optimizer.apply(grads, self.trainable_variables)
                return {"loss": loss}

        model = Net([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(optimizer if where == "model.optimizer" else None)
        if where in ("list", "dict"):
            model.own = [optimizer] if where == "list" else {"first": optimizer}
        if where == "loop":
            _loop(strategy, model, optimizer, tf.data.Dataset.from_tensor_slices((x, y)))
        else:
            model.fit(x, y, BATCH, 1, shuffle=False, verbose=0)
        return common.weights(model)


def recompiled(strategy: Any, *, rule: dict[str, Any], flushed: bool) -> list[Any]:
    """The weights after a model got a new optimizer in the middle of a period.

    Args:
        strategy: the strategy.
        rule: the update rule.
        flushed: whether the program flushes the model before.
    """
    x, y = common.table(BATCH * 4)
    with ruled(strategy, rule), scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy())
        model.train_on_batch(x[:BATCH], y[:BATCH])
        if flushed:
            strategy.flush(model)
        model.compile(keras.optimizers.SGD(0.2), common.sparse_crossentropy())
        model.fit(x, y, BATCH, 1, shuffle=False, verbose=0)
        return common.weights(model)


def updated_twice(strategy: Any, *, rule: dict[str, Any], apart: bool) -> list[Any]:
    """The weights after steps that apply two optimizers, to weights of their own or to the same."""
    x, y = common.table(BATCH * 5)
    with ruled(strategy, rule), scope(strategy):

        class Net(keras.Sequential):
            def train_step(self, data: Any) -> Any:
                loss, grads = _gradients(self, *data)
                weights, cut = self.trainable_variables, 2 if apart else 0
                self.optimizer.apply(grads[cut:], weights[cut:])
                self.second.apply(grads[:2], weights[:2])
                return {"loss": loss}

        model = Net([keras.Input((8,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)])
        model.second = keras.optimizers.SGD(0.05)
        model.compile(keras.optimizers.SGD(0.1))
        model.fit(x, y, BATCH, 1, shuffle=False, verbose=0)
        return common.weights(model)


def _loop(strategy: Any, model: Any, optimizer: Any, dataset: Any) -> None:
    def step(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            each = common.sparse_crossentropy(reduction="none")(labels, model(inputs))
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    everywhere = tf.function(lambda *batch: strategy.run(step, batch))
    for batch in strategy.experimental_distribute_dataset(dataset.batch(BATCH)):
        everywhere(*batch)
    model.trainable = False  # What is pending is flushed all the same.
    strategy.flush(model)
