"""Pipelines on the four logical CPU devices of one process, and what they are compared with."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import unittest.mock
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import placement_cases as placed
from tests.cases.data_cases import LookedUpTwice
from tests.cases.placement_cases import apart
from tfdist.strategies.pipeline.engine import Worker
from tfdist.strategies.pipeline.schedules import Kind, live_activations, make
from tfdist.strategies.pipeline.state import PipelineError
from tfdist.strategies.pipeline.strategy import Pipeline

layers = keras.layers


def dense(depth: int = 6) -> keras.Model:
    hidden = [
        layers.Dense(16, "tanh", name=f"dense{i}", kernel_regularizer="l2") for i in range(depth)
    ]
    return keras.Sequential([keras.Input((12,)), *hidden, layers.Dense(3, name="head")])


def two_headed() -> keras.Model:
    """Two inputs, and two outputs of which one is made in the middle."""
    a, b = keras.Input((12,), name="a"), keras.Input((12,), name="b")
    h = layers.Dense(16, "relu", name="first")(a)
    early = layers.Dense(3, name="early")(h)
    h = layers.Dense(16, "relu", name="second")(h)
    h = layers.Concatenate(name="join")([h, layers.Dense(8, name="other")(b)])
    return keras.Model({"a": a, "b": b}, {"early": early, "late": layers.Dense(3, name="late")(h)})


def branched() -> keras.Model:
    """The branched model of the placement, without what a microbatch changes: statistics, loops."""
    encoder = keras.Sequential(
        [keras.Input((12,)), layers.Dense(16, "relu", name="one"), layers.Dense(16, name="two")],
        name="encoder",
    )
    x, ids = keras.Input((12,)), keras.Input((5,), dtype="int32")
    read = encoder(x)
    h = layers.Embedding(20, 16, mask_zero=True, name="embedding")(ids)
    h = layers.LSTM(16, name="lstm")(h)
    for i in range(3):
        h = layers.Dense(16, "tanh", name=f"decoder{i}")(h) + read
    h = placed.Gated(name="gated")(h, other=read)
    return keras.Model([x, ids], layers.Dense(3, name="head")(h))


def tied(tie_weights: bool = True) -> keras.Model:
    """A language model whose table makes the logits too, and a layer that is called in between."""
    ids = keras.Input((5,), dtype="int32")
    table = layers.ReversibleEmbedding(23, 16, tie_weights, name="table")
    same = layers.Dense(16, "tanh", kernel_regularizer="l2", name="same")
    h = same(table(ids))
    for i in range(4):
        h = h + layers.Dense(16, "relu", name=f"block{i}")(h)
    return keras.Model(ids, table(same(h), reverse=True))


class Block(layers.Layer):
    """A layer around another one."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.inner = layers.Dense(16, "tanh")

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


def adapted() -> keras.Model:
    """Layers that are frozen but for weights of low rank in them, as KerasHub's backbones make."""
    blocks = [Block(name=f"block{i}") for i in range(5)]
    model = keras.Sequential([keras.Input((12,)), *blocks, layers.Dense(3, name="head")])
    for block in blocks:
        block.trainable = False
        block.inner.trainable = True
        block.inner.enable_lora(4)
    assert len(model.trainable_weights) == 2 + 3 * len(blocks)
    return model


MODELS = {
    "dense": dense,
    "two_headed": two_headed,
    "branched": branched,
    "tied": tied,
    "untied": lambda: tied(tie_weights=False),
    "adapted": adapted,
}


def data(name: str, examples: int = 80) -> tuple[Any, Any, Any]:
    """Inputs, labels and sample weights."""
    rng = np.random.default_rng(0)
    if name in ("tied", "untied"):
        ids = rng.integers(0, 23, (examples, 6)).astype("int32")
        return ids[:, :-1], ids[:, 1:], rng.uniform(0.1, 2.0, (examples, 5)).astype("float32")
    x = rng.normal(size=(examples, 12)).astype("float32")
    y = rng.integers(0, 3, examples)
    weights = rng.uniform(0.1, 2.0, examples).astype("float32")
    if name == "two_headed":
        other = rng.normal(size=(examples, 12)).astype("float32")
        heads = {"early": y, "late": (y + 1) % 3}
        return {"a": x, "b": other}, heads, {"early": weights, "late": weights[::-1].copy()}
    if name == "branched":
        return [x, rng.integers(0, 20, (examples, 5))], y, weights
    return x, y, weights


def compiled(model: keras.Model, optimizer: str = "adam") -> keras.Model:
    made = {
        "adam": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=1.0, weight_decay=1e-3),
        "by rows": lambda: keras.optimizers.Adam(1e-2),
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "plain": lambda: keras.optimizers.SGD(0.05),
    }[optimizer]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    names = getattr(model, "output_names", [""])
    each = {name: ["accuracy"] for name in names} if len(names) > 1 else ["accuracy"]
    losses = dict.fromkeys(names, loss) if len(names) > 1 else loss
    model.compile(made, losses, metrics=each, weighted_metrics=[], jit_compile=False)
    return model


def pipeline(stages: int, replicas: int = 1, **options: Any) -> Pipeline:
    devices = [f"cpu:{i}" for i in range(stages * replicas)]
    return Pipeline(devices, stages=stages, **options)


def equals_unsplit(
    strategy: Any, name: str, optimizer: str = "adam", weighted: bool = True, **options: Any
) -> dict[str, Any]:
    """50 steps with sample weights and an uneven last batch, beside the model as a whole."""
    # Of a last batch that is smaller, Keras weighs the losses of several outputs wrongly.
    x, y, weights = data(name, 400 if name == "two_headed" else 398)
    weights = weights if weighted else None
    plain = compiled(MODELS[name](), optimizer)
    start = plain.get_weights()
    kwargs = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False}
    first = plain.fit(x, y, sample_weight=weights, **kwargs)
    made = pipeline(**options)
    with made.scope():
        model = compiled(MODELS[name](), optimizer)
    model.set_weights(start)
    second = model.fit(x, y, sample_weight=weights, **kwargs)
    shape = made.shape
    schedule = make(
        shape.schedule, shape.stages, shape.microbatches // shape.replicas, virtual=shape.virtual
    )
    engine = model.train_function.engine
    return {
        "weights": apart(plain.get_weights(), model.get_weights()),
        "history": [fit.history for fit in (first, second)],
        "evaluated": [m.evaluate(x, y, verbose=0, return_dict=True) for m in (plain, model)],
        "updates": int(model.optimizer.iterations),
        "live": [worker.live for workers in engine.workers for worker in workers],
        "counted": live_activations(schedule) * shape.replicas,
        "devices": sorted({w.value.device[-5:] for w in model.weights}),
        "borrowed": {v.path for chunk in engine.cut.chunks for v in chunk.borrowed.values()},
        "boxes": collections.Counter(box.device for box in made.boxes(model)),
        "again": [
            _runs_forward(passes)
            for workers in engine.workers
            for worker in workers
            for passes in worker._passes.values()
        ],
    }


def _runs_forward(passes: Any) -> bool:
    """Whether a backward pass computes the activations of `dense`; its gradients need no Tanh."""
    (graphs, *_) = passes._traced.values()
    (backward, *_) = graphs._backwards.values()
    found = backward.concrete.graph.as_graph_def()
    functions = [f.node_def for f in found.library.function]
    return any(node.op == "Tanh" for nodes in (found.node, *functions) for node in nodes)


def over_masks() -> keras.Model:
    """A head for each token, with a mask of the ids, and one that is weighed by examples."""
    ids = keras.Input((6,), dtype="int32")
    h = layers.Embedding(
        20, 8, mask_zero=True, name="embedding", embeddings_regularizer=keras.regularizers.L2(0.01)
    )(ids)
    h = layers.Dense(8, "tanh", name="hidden")(h)
    tokens = layers.Dense(3, name="tokens")(h)
    return keras.Model(ids, {"tokens": tokens, "whole": layers.Dense(1, name="whole")(pooled(h))})


def pooled(x: Any) -> Any:
    return layers.GlobalAveragePooling1D(name="pooled")(x)


def equals_over_masks(strategy: Any, **options: Any) -> dict[str, Any]:
    """Losses that are divided by what a mask leaves, and by the sum of weights."""
    rng = np.random.default_rng(0)
    there = rng.uniform(size=(80, 6)) < np.linspace(0, 1, 80)[:, None]
    ids = rng.integers(0, 20, (80, 6)) * there
    ids[:, 0] = 1  # Of a row without a token Keras makes a mean of nothing.
    y = {"tokens": ids % 3, "whole": ids.mean(1, keepdims=True) / 20}
    weights = {"tokens": rng.uniform(0.1, 2, (80, 6)), "whole": np.linspace(0, 2, 80) ** 2}
    losses = {
        "tokens": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "whole": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    }
    found: dict[str, Any] = {}
    start = None
    for name, made in (("plain", contextlib.nullcontext()), ("piped", pipeline(**options).scope())):
        with made:
            model = over_masks()
            model.compile(
                keras.optimizers.SGD(0.1),
                losses,
                metrics={"tokens": ["accuracy"]},
                loss_weights={"tokens": 1.0, "whole": 3.0},
                jit_compile=False,
            )
        start = model.get_weights() if start is None else start
        model.set_weights(start)
        fit = model.fit(ids, y, 16, 2, sample_weight=weights, verbose=0, shuffle=False)
        found[name] = model.get_weights()
        found[f"{name} history"] = fit.history
    return {**found, "weights": apart(found["plain"], found["piped"])}


class Normalization(layers.BatchNormalization):
    """Computes as Keras's own layer does, with no `call` of its own."""


def with_statistics(drop: bool) -> keras.Model:
    noise = [layers.Dropout(0.5, seed=7, name="drop")] if drop else []
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16, "relu", name="one"),
            Normalization(momentum=0.8, name="norm"),
            *noise,
            layers.Dense(16, "relu", name="two"),
            layers.Dense(3, name="head"),
        ]
    )


def statistics(strategy: Any, drop: bool = False) -> dict[str, Any]:
    """Microbatches beside the same by hand: each has its own statistics, which are averaged."""
    x, y, _ = data("dense", 64)
    by_hand = with_statistics(drop)
    start = by_hand.get_weights()
    optimizer = keras.optimizers.SGD(0.05)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    state = by_hand.non_trainable_variables
    for first in range(0, 64, 16):
        before, after, grads = [v.numpy() for v in state], [], []
        for number in range(4):
            for v, value in zip(state, before, strict=True):
                seed = "seed" in v.name
                v.assign(value + np.array([number, 0], value.dtype) if seed else value)
            rows = slice(first + 4 * number, first + 4 * number + 4)
            with tf.GradientTape() as tape:
                loss = loss_of(y[rows], by_hand(x[rows], training=True))
            grads.append(tape.gradient(loss, by_hand.trainable_weights))
            after.append([v.numpy() for v in state])
        optimizer.apply(
            [tf.add_n(each) / 4 for each in zip(*grads, strict=True)], by_hand.trainable_weights
        )
        for v, values in zip(state, zip(*after, strict=True), strict=True):
            v.assign(values[0] if "seed" in v.name else np.mean(values, 0))
    found = {}
    for name, options in {"kept": {}, "again": {"recompute": True}}.items():
        made = pipeline(2, microbatches=4, cuts=["two"], **options)
        with made.scope():
            model = compiled(with_statistics(drop), "plain")
        model.set_weights(start)
        model.fit(x, y, 16, verbose=0, shuffle=False)
        found[name] = apart(by_hand.get_weights(), model.get_weights())
        found[f"{name} live"] = [w.live for w in model.train_function.engine.workers[0]]
    found["moved"] = apart(start, by_hand.get_weights())
    return found


def handed_out_slowly(strategy: Any) -> int:
    """Updates of a schedule without a flush, where the first stage is given its updates late."""
    x, y, _ = data("dense", 64)
    made = pipeline(2, schedule="2bw", microbatches=2)
    with made.scope():
        model = compiled(dense(), "sgd")
    push = Worker.push

    def late(self: Any, step: Any, batch: Any) -> None:
        push(self, step, batch)
        if step.kind is Kind.BACKWARD and self.device == 0:
            time.sleep(0.2)

    with unittest.mock.patch.object(Worker, "push", late):
        model.fit(x, y, 16, 2, verbose=0, shuffle=False)
    return int(model.optimizer.iterations)


def saved(strategy: Any, directory: str, schedule: str, microbatches: int) -> dict[str, Any]:
    """A checkpoint of an epoch, loaded without a pipeline; and training that goes on."""
    x, y, _ = data("dense", 64)
    made = pipeline(2, schedule=schedule, microbatches=microbatches)
    with made.scope():
        model = compiled(dense(), "sgd")
    path = f"{directory}/{schedule}.keras"
    keeper = keras.callbacks.ModelCheckpoint(path)
    model.fit(x, y, 16, 2, verbose=0, callbacks=[keeper], shuffle=False)
    loaded = keras.models.load_model(path)
    found = {
        "weights": apart(loaded.get_weights(), model.get_weights()),
        "updates": int(loaded.optimizer.iterations),
        "devices": sorted({w.value.device[-5:] for w in loaded.weights}),
    }
    loss = model.evaluate(x, y, verbose=0)[0]
    model.set_weights(loaded.get_weights())
    model.fit(x, y, 16, 1, verbose=0, shuffle=False)
    found["goes on"] = model.evaluate(x, y, verbose=0)[0] < loss
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(x, y, 16, 1, verbose=0)
    found["threads"] = sum("tfdist-stage" in thread.name for thread in threading.enumerate())
    return found


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return {}


class Broken(layers.Layer):
    """Fails in the third call of its function."""

    def call(self, x: Any) -> Any:
        tf.debugging.assert_less(tf.reduce_max(x), 1e3, "too large an input")
        return x


class Greedy(layers.Layer):
    """Asks for 64 TiB where its input is large."""

    def call(self, x: Any) -> Any:
        count = tf.where(tf.reduce_max(x) > 1e3, tf.constant(2**44, tf.int64), 1)
        return x + tf.reduce_sum(tf.fill([count], 0.0))


def _stateful() -> keras.Model:
    first = keras.Input((5, 4), batch_size=16)
    h = layers.LSTM(4, stateful=True, name="memory")(first)
    return keras.Model(first, layers.Dense(3, name="head")(h))


def _stateful_lazy() -> keras.Model:
    memory = layers.LSTM(4, stateful=True, name="memory")
    return keras.Sequential([memory, layers.Dense(3, name="head")])


def _shared() -> keras.Model:
    x = keras.Input((12,))
    same = layers.BatchNormalization(name="same")
    return keras.Model(x, layers.Dense(3, name="head")(same(layers.Dense(12, name="mid")(same(x)))))


def _own_step() -> keras.Model:
    x = keras.Input((12,))
    return OwnStep(x, layers.Dense(3, name="head")(layers.Dense(4, name="mid")(x)))


def _looked_up() -> keras.Model:
    x = keras.Input((12,), dtype="int32")
    return keras.Model(x, layers.Dense(3, name="head")(LookedUpTwice(name="table")(x)))


def _masked() -> keras.Model:
    x = keras.Input((12, 1))
    h = layers.Dense(4, "relu", name="hidden")(x)
    return keras.Model(x, layers.Dense(3, name="head")(layers.Masking(name="masking")(h)))


INTERLEAVED = {"schedule": "interleaved", "virtual": 2}


def root_mean_square(y: Any, p: Any) -> Any:
    """A metric that is no mean over the examples."""
    del y
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(p)))


def largest_output(y: Any, p: Any) -> Any:
    """A metric in which the examples of a batch meet."""
    del y
    return keras.ops.max(p)


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "assigned": (
        lambda: keras.Sequential(
            [
                keras.Input((12,)),
                layers.SpectralNormalization(layers.Dense(6), name="normalized"),
                layers.Dense(3),
            ]
        ),
        {"stages": 2},
    ),
    "layers": (lambda: dense(1), {"stages": 4}),
    "batch": (dense, {"stages": 2, "microbatches": 3}),
    "device": (dense, {"stages": 5}),
    "shared": (_shared, {"stages": 2, "cuts": ["mid"]}),
    "stateful": (_stateful, {"stages": 2}),
    "stateful, lazy": (_stateful_lazy, {"stages": 2}),
    "subclassed": (placed.subclassed, {"stages": 2}),
    "own step": (_own_step, {"stages": 2}),
    "looked up": (_looked_up, {"stages": 2}),
    "masked": (_masked, {"stages": 2}),
    "border": (dense, {"stages": 2, "cuts": ["dance1"]}),
    "order": (dense, {"stages": 3, "microbatches": 4, "cuts": ["dense4", "dense2"]}),
    "borders": (dense, {"stages": 3, "microbatches": 4, "cuts": ["dense4"]}),
    "divide": (dense, {"stages": 3, "replicas": 1, "microbatches": 4, **INTERLEAVED}),
    "clip": (dense, {"stages": 2, "schedule": "2bw", "optimizer": "adam"}),
    "replicas": (dense, {"stages": 2, "replicas": 2, "schedule": "pipedream"}),
    "share out": (dense, {"stages": 2, "replicas": 2, "microbatches": 3}),
    "no number": (dense, {"stages": 2, "microbatches": 2, "reduction": "none"}),
    "root": (dense, {"stages": 2, "microbatches": 2, "metric": root_mean_square}),
    "largest": (dense, {"stages": 2, "microbatches": 2, "metric": largest_output}),
}
#: What is no option of the strategy.
_OF_COMPILE = ("optimizer", "reduction", "metric")


def refused(strategy: Any, what: str) -> str:
    """What the user is told, before or at the first step."""
    make_model, given = WRONG[what]
    options = {k: value for k, value in given.items() if k not in _OF_COMPILE}
    optimizer = given.get("optimizer", "plain")
    shape = {"masked": (16, 12, 1)}.get(what, (16, 5, 4) if "stateful" in what else (16, 12))
    x = np.ones(shape, "float32")
    y = np.zeros((16, 12) if what == "masked" else 16, "int32")
    try:
        made = pipeline(**options)
        with made.scope():
            model = compiled(make_model(), optimizer)
            if "reduction" in given:
                kind = keras.losses.SparseCategoricalCrossentropy
                model.compile("sgd", kind(from_logits=True, reduction=given["reduction"]))
            if "metric" in given:
                loss = "sparse_categorical_crossentropy"
                model.compile("sgd", loss, metrics=["accuracy", given["metric"]])
        model.fit(x, y, 16, verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fails_in_the_middle(strategy: Any, how: str) -> dict[str, Any]:
    """A stage fails: its error comes with its place, nothing hangs, and training can go on."""
    x = keras.Input((12,))
    h = layers.Dense(16, name="one")(x)
    made = pipeline(3, microbatches=4, cuts=["broken", "head"])
    with made.scope():
        h = {"fails": Broken, "memory": Greedy}[how](name="broken")(h)
        model = compiled(keras.Model(x, layers.Dense(3, name="head")(h)), "plain")
    good, y = np.ones((16, 12), "float32"), np.zeros(16, "int32")
    bad = good.copy()
    bad[9] = np.sign(model.layers[1].kernel.numpy().sum(1)) * 1e9
    model.fit(good, y, 16, verbose=0)
    told = kind = ""
    before = model.get_weights()
    try:
        model.fit(bad, y, 16, verbose=0)
    except (tf.errors.InvalidArgumentError, PipelineError) as error:
        told, kind = "\n".join([str(error), *getattr(error, "__notes__", [])]), type(error).__name__
    unchanged = apart(before, model.get_weights())
    under_way = model.train_function.is_under_way
    fit = model.fit(good, y, 16, verbose=0)
    return {
        "told": told,
        "kind": kind,
        "unchanged": unchanged,
        "under way": under_way,
        "loss": fit.history["loss"][0],
    }
