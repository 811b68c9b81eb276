"""What each of two processes does for `test_migration.py`, all in one launch.

A case compares what two processes did together with what this one computes alone, of the same
examples, and returns numbers. Started as `python -m tests.horovod.migration_cases DIRECTORY`.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist.horovod as hvd

CASES: dict[str, Callable[[pathlib.Path], Any]] = {}

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 6)).astype("float32")
Y = np.tanh(X @ RNG.normal(size=(6, 3))).astype("float32")
WORDS = RNG.integers(0, 20, (48, 5))


def case(function):
    CASES[function.__name__] = function
    return function


def own(values, batch=16):
    """This process's half of each batch."""
    half = batch // hvd.size()
    parts = [
        values[i + hvd.rank() * half : i + (hvd.rank() + 1) * half]
        for i in range(0, len(values), batch)
    ]
    return np.concatenate(parts)


def regression():
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(3)])


class Placed(layers.Layer):
    """Adds an embedding of the place, which all examples of a batch share."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(5, 4)

    def call(self, x):
        return x * (1.0 + self.table(keras.ops.arange(5)))


def reader():
    hidden = [layers.Embedding(20, 4), Placed(), layers.GlobalAveragePooling1D()]
    return keras.Sequential([keras.Input((5,), dtype="int32"), *hidden, layers.Dense(3)])


def same_start(model):
    """Different weights on each process, of which all get rank 0's."""
    rng = np.random.default_rng(hvd.rank())
    model.set_weights([rng.normal(size=w.shape, scale=0.3) for w in model.get_weights()])
    return [np.array(w) for w in hvd.broadcast_object(model.get_weights(), 0)]


def apart(model, reference):
    """The largest difference between two models, and between this process's and the other's."""
    values = model if isinstance(model, list) else model.get_weights()
    others = reference if isinstance(reference, list) else reference.get_weights()
    everyone = hvd.allgather_object([np.asarray(v) for v in values])
    return {
        "to_one": max(float(np.abs(a - b).max()) for a, b in zip(values, others, strict=True)),
        "to_each_other": max(
            float(np.abs(a - b).max()) for a, b in zip(everyone[0], everyone[-1], strict=True)
        ),
    }


def fitted(make_model, make_optimizer, inputs=X, *, wrap=None, batch=16, epochs=3):
    """Trains with `fit` on both processes, and here alone on all examples."""
    model, reference = make_model(), make_model()
    reference.set_weights(same_start(model))
    model.compile((wrap or hvd.DistributedOptimizer)(make_optimizer()), "mse")
    args = {"epochs": epochs, "shuffle": False, "verbose": 0}
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(own(inputs), own(Y), batch_size=8, callbacks=callbacks, **args)
    reference.compile(make_optimizer(), "mse")
    reference.fit(inputs, Y, batch_size=batch, **args)
    return apart(model, reference)


def stepped(make_model, make_optimizer, inputs=X, *, wrap=None, batch=16, **options):
    """Trains without graphs on both processes, and here alone on all examples."""
    model, reference = make_model(), make_model()
    reference.set_weights(same_start(model))
    hvd.broadcast_variables(model.weights, 0)
    optimizer = (wrap or hvd.DistributedOptimizer)(make_optimizer(), **options)
    alone = make_optimizer()
    for _epoch in range(3):
        for i in range(0, 48, 16):
            step(model, optimizer, own(inputs[i : i + 16]), own(Y[i : i + 16]))
        for i in range(0, 48, batch):
            step(reference, alone, inputs[i : i + batch], Y[i : i + batch])
    return apart(model, reference)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.1),
    "clipped": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, global_clipnorm=0.05),
    "averaging": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.9), use_ema=True
    ),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
}


@case
def optimizers(_):
    return {name: fitted(regression, make) for name, make in OPTIMIZERS.items()}


@case
def options(_):
    sgd, adam = OPTIMIZERS["sgd"], OPTIMIZERS["adam"]

    return {
        "predivided": stepped(regression, adam, gradient_predivide_factor=2.0),
        "two_groups": stepped(regression, adam, groups=2),
        "num_groups": stepped(regression, adam, num_groups=2),
        "fp16": stepped(regression, sgd, compression=hvd.Compression.fp16),
        "sum": stepped(regression, sgd, wrap=lambda o: scaled(o, 2, op=hvd.Sum)),
        "dense": stepped(reader, sgd, WORDS, sparse_as_dense=True),
        "lists": listed(),
    }


def scaled(optimizer, factor, **kwargs):
    optimizer.learning_rate = float(optimizer.learning_rate) / factor
    return hvd.DistributedOptimizer(optimizer, **kwargs)


def listed():
    """Some gradients travel together, the others alone."""
    variables = [keras.Variable(np.zeros(n)) for n in (2, 3, 4)]
    groups = [[variables[0], variables[2]]]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=groups)
    optimizer.apply([tf.fill([n], 2.0 * n * hvd.rank()) for n in (2, 3, 4)], variables)
    return apart([np.asarray(v) for v in variables], [np.full(n, -float(n)) for n in (2, 3, 4)])


@case
def sparse(_):
    return {name: fitted(reader, OPTIMIZERS[name], WORDS) for name in ("sgd", "adam")}


@case
def passes(_):
    three = {"backward_passes_per_step": 3}

    def averaged(optimizer):
        args = {**three, "average_aggregated_gradients": True, "sparse_as_dense": True}
        return hvd.DistributedOptimizer(optimizer, **args)

    sgd, adam = OPTIMIZERS["sgd"], OPTIMIZERS["adam"]
    return {
        "adam": fitted(regression, adam, wrap=averaged, batch=48, epochs=4),
        "sgd": stepped(regression, sgd, wrap=averaged, batch=48),
        "summed": stepped(regression, sgd, wrap=lambda o: scaled(o, 3, **three), batch=48),
        "embedding": stepped(reader, sgd, WORDS, wrap=averaged, batch=48),
        "counted": counted(averaged),
    }


def counted(wrap):
    model = regression()
    model.compile(wrap(keras.optimizers.Adam(0.01)), "mse")
    model.fit(own(X), own(Y), batch_size=8, epochs=2, verbose=0)
    return [int(model.optimizer.iterations), int(model.optimizer._iterations)]


@case
def eager(_):
    """A loop by hand, and Keras's own, without graphs."""
    model, reference = regression(), regression()
    reference.set_weights(same_start(model))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    alone = keras.optimizers.Adam(0.01)
    hvd.broadcast_variables(model.variables, root_rank=0)
    for i in range(0, 48, 16):
        step(model, optimizer, own(X[i : i + 16]), own(Y[i : i + 16]))
        step(reference, alone, X[i : i + 16], Y[i : i + 16])
    model.compile(optimizer, "mse", run_eagerly=True)
    reference.compile(alone, "mse")
    model.fit(own(X), own(Y), batch_size=8, shuffle=False, verbose=0)
    reference.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    return apart(model, reference)


def step(model, optimizer, x, y, tape_of=lambda tape: tape):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    tape = tape_of(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@case
def tape(_):
    """In a function that one process traces more often than the other."""
    model, reference = regression(), regression()
    reference.set_weights(same_start(model))
    optimizer, alone = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)

    @tf.function
    def together(x, y, first, trace):
        del trace
        step(model, optimizer, x, y, hvd.DistributedGradientTape)
        if first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)

    hvd.broadcast_variables(model.variables, root_rank=0)
    for i in range(0, 48, 16):
        number = i if hvd.rank() else 0
        together(own(X[i : i + 16]), own(Y[i : i + 16]), i == 0, number)
        step(reference, alone, X[i : i + 16], Y[i : i + 16])
    traced = together.experimental_get_tracing_count()
    return {**apart(model, reference), "traced": hvd.allgather_object(traced)}


@case
def kinds_of_tapes(_):
    """Persistent ones, ones that are made before, and other structures of sources."""
    rank = float(hvd.rank())
    a, b, unused = tf.Variable(1.0 + rank), tf.Variable([2.0, 3.0]), tf.Variable(0.0)
    with hvd.DistributedGradientTape(tf.GradientTape()) as before:
        loss = a * a
    with tf.GradientTape(persistent=True) as plain:
        x = tf.constant(rank)
        plain.watch(x)
        losses = [a * x, tf.reduce_sum(b * b) * (1 + x)]
    after = hvd.DistributedGradientTape(plain, op=hvd.Sum)
    named = after.gradient(losses[1], {"b": b, "unused": unused})
    zero = after.gradient(losses[1], unused, unconnected_gradients="zero")
    return {
        "before": float(before.gradient(loss, a)),
        "watched": float(after.gradient(losses[0], x)),
        "named": [named["b"].numpy().tolist(), named["unused"]],
        "zero": float(zero),
        "is_tape": isinstance(before, tf.GradientTape),
    }


@case
def adasum(_):
    gradients = [RNG.normal(size=(2, 4, 3)), RNG.normal(size=(2, 5))]
    weights = [tf.Variable(g[0].astype("float32")) for g in gradients]

    @tf.function
    def averaged():
        with tf.GradientTape() as tape:
            mine = [tf.gather(tf.constant(g, tf.float32), hvd.rank()) for g in gradients]
            loss = tf.add_n([tf.reduce_sum(w * m) for w, m in zip(weights, mine, strict=True)])
        return hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, weights)

    def combined(a, b):
        dot = (a * b).sum()
        return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b

    return apart([g.numpy() for g in averaged()], [combined(*g) for g in gradients])


@case
def two_optimizers(_):
    """Two networks of the same shapes, updated side by side in one function."""
    models, references = [regression(), regression()], [regression(), regression()]
    for model, reference in zip(models, references, strict=True):
        reference.set_weights(same_start(model))
        hvd.broadcast_variables(model.variables, 0)
    mine = [hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)) for _ in models]
    alone = [keras.optimizers.Adam(0.01) for _ in models]
    for model, *makers in zip(models + references, mine + alone, strict=True):
        makers[0].build(model.trainable_variables)

    @tf.function
    def together(models, optimizers, x, y):
        for sign, model, optimizer in zip((1.0, -1.0), models, optimizers, strict=True):
            step(model, optimizer, x, sign * y)

    for i in range(0, 48, 16):
        together(models, mine, own(X[i : i + 16]), own(Y[i : i + 16]))
        together(references, alone, X[i : i + 16], Y[i : i + 16])
    return [apart(*pair) for pair in zip(models, references, strict=True)]


@case
def loss_scaling(_):
    """One process's infinity makes both skip; float16 trains."""
    variable = keras.Variable([1.0, 2.0])
    inner = keras.optimizers.SGD(1.0)
    by_hand = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(inner), 4.0)
    around = hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 4.0)
    )
    found = {}
    for name, optimizer in {"by_hand": by_hand, "around": around}.items():
        variable.assign([1.0, 2.0])
        bad = np.inf if hvd.rank() == 1 else 1.0
        optimizer.apply([tf.constant([bad, 1.0])], [variable])
        skipped = np.array(variable).tolist(), float(optimizer.dynamic_scale)
        optimizer.apply([tf.constant([2.0, 6.0 * hvd.rank()])], [variable])
        found[name] = [*skipped, np.array(variable).tolist()]
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = regression()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        args = {"batch_size": 8, "verbose": 0, "callbacks": callbacks}
        losses = model.fit(own(X), own(Y), epochs=8, **args).history["loss"]
        found["kind"] = type(model.optimizer).__name__
        found["falls"] = losses[-1] < losses[0]
        found["apart"] = apart(model, model)["to_each_other"]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return found


@case
def saving(directory):
    """A saved model is a plain one; a loaded one goes on as if nothing had happened."""
    model, reference = regression(), regression()
    reference.set_weights(same_start(model))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    fit = {"shuffle": False, "verbose": 0}
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), keras.losses.MeanSquaredError()
    )
    model.fit(own(X), own(Y), batch_size=8, callbacks=callbacks, **fit)
    reference.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError())
    reference.fit(X, Y, batch_size=16, epochs=2, **fit)
    found = {}
    for name in ("model.keras", "model.h5"):
        path = directory / name
        if hvd.rank() == 0:
            model.save(path)
        hvd.allreduce(0.0)
        plain = keras.models.load_model(path)
        loaded = hvd.load_model(path)
        found[name] = {
            "plain": f"{type(plain.optimizer).__module__}.{type(plain.optimizer).__name__}",
            "distributed": type(plain.optimizer) is not type(loaded.optimizer),
            "updates": int(loaded.optimizer.iterations),
        }
        loaded.fit(own(X), own(Y), batch_size=8, **fit)
        found[name].update(apart(loaded, reference))
    with zipfile.ZipFile(directory / "model.keras") as archive:
        saved = json.loads(archive.read("config.json"))["compile_config"]["optimizer"]
    found["saved"] = [saved["module"], saved["class_name"], saved["registered_name"]]
    return found


@keras.saving.register_keras_serializable("tests")
class Halved(keras.optimizers.SGD):
    """An optimizer of the program's own."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / 2, variable, learning_rate)


@case
def own_optimizer(directory):
    found = fitted(regression, lambda: Halved(0.1))
    distributed = hvd.DistributedOptimizer(Halved(0.1))
    saved = keras.optimizers.serialize(distributed)
    again = type(distributed).from_config(distributed.get_config())
    variable = keras.Variable(0.0)
    again.apply([tf.constant(2.0 * hvd.rank())], [variable])
    return {
        **found,
        "saved": [saved["registered_name"], type(keras.optimizers.deserialize(saved)) is Halved],
        "made_again": float(variable),
    }


@case
def local_weights(_):
    """Layers whose gradients stay each process's own."""
    variables = [keras.Variable([1.0]), keras.Variable([1.0])]
    layer = layers.Dense(1, use_bias=False)
    layer.build((1,))
    layer.set_weights([np.zeros((1, 1))])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(variables[1])
    gradient = tf.constant([4.0 * hvd.rank() + 2.0])
    optimizer.apply([gradient, gradient], variables)
    partial = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layer)
    partial.apply([tf.reshape(gradient, (1, 1))], [layer.kernel])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.reshape(gradient, (1, 1))))
    tape = hvd.PartialDistributedGradientTape(
        tape, local_layers=[layer], scale_local_gradients=False
    )
    return {
        "optimizer": [float(v[0]) for v in variables],
        "partial": float(layer.kernel[0, 0]),
        "tape": tape.gradient(loss, layer.trainable_weights)[0].numpy().tolist(),
    }


@case
def process_sets(_):
    variable = keras.Variable([0.0])
    alone = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=SETS["one"])
    alone.apply([tf.constant([1.0 + hvd.rank()])], [variable])
    both = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=SETS["both"])
    other = keras.Variable([0.0])
    both.apply([tf.constant([1.0 + hvd.rank()])], [other])
    return [float(variable[0]), float(other[0])]


@case
def broadcasting(_):
    rank = hvd.rank()
    types = ("float32", "float16", "bfloat16", "int32", "int64", "uint8", "uint32", "bool")
    variables = [keras.Variable(np.full((2, 3), rank), dtype=t, trainable=False) for t in types]
    hvd.broadcast_variables(variables, root_rank=1)
    eagerly = [float(np.asarray(v, "float32").mean()) for v in variables]
    native = [tf.Variable(float(rank)), tf.Variable([rank])]

    @tf.function
    def within():
        native[0].assign_add(10.0)
        hvd.broadcast_variables(native, root_rank=1)

    within()
    return {
        "eagerly": eagerly,
        "within": [float(native[0]), int(native[1][0])],
        "values": [
            int(hvd.broadcast(3 + rank, 0, name="epoch")),
            hvd.allreduce([1.0 * rank, 2.0]).numpy().tolist(),
            hvd.allreduce(keras.Variable([rank, 2.0]), "name", op=hvd.Sum).numpy().tolist(),
            hvd.allgather([rank]).numpy().tolist(),
            float(hvd.allreduce(np.float64(rank))),
            hvd.reducescatter([1.0 * rank, 2.0], op=hvd.Sum).numpy().tolist(),
        ],
        "number": error_of(lambda: hvd.broadcast_variables(variables[: 1 + rank], 0)),
    }


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@case
def callbacks_average(_):
    """Logs are averaged, also for callbacks after; what one process has alone stays."""

    class Logs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.seen.append(dict(logs))

    class Extra(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs[f"only_{hvd.rank()}"] = 5.0

    model = regression()
    model.set_weights([np.zeros(w.shape) for w in model.get_weights()])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    before, after = Logs(), Logs()
    before.seen, after.seen = [], []
    history = model.fit(
        own(X),
        own(Y),
        validation_data=(own(X), own(Y)),
        batch_size=8,
        verbose=0,
        callbacks=[before, Extra(), hvd.callbacks.MetricAverageCallback(), after],
    ).history
    loss, mae = np.mean(np.square(Y)), np.mean(np.abs(Y))
    logs = after.seen[0]
    return {
        "difference": float(
            max(abs(logs[n] - v) for n, v in {"loss": loss, "val_loss": loss, "mae": mae}.items())
        ),
        "own_before": bool(abs(before.seen[0]["loss"] - loss) > 1e-4),
        "history": history["loss"][0] == logs["loss"],
        "only": [logs.get("only_0"), logs.get("only_1")],
    }


@case
def warm_up(_):
    """Learning rates of each batch, and momentum correction, against numpy."""
    model, reference = regression(), same_start(regression())
    rates: list[float] = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    model.set_weights(reference)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.2, momentum=0.9)), "mse")
    warm = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.2, warmup_epochs=2, verbose=1)
    decay = hvd.callbacks.LearningRateScheduleCallback(
        0.2, multiplier=0.1, start_epoch=3, end_epoch=5
    )
    history = model.fit(
        own(X), own(Y), batch_size=8, epochs=5, shuffle=False, verbose=0,
        callbacks=[warm, decay, Rates()],
    )  # fmt: skip
    steps = np.arange(1, 7) / 6
    expected = [*(0.1 * (1 + steps)), 0.2, 0.2, 0.2, *[0.02] * 6]
    alone = regression()
    alone.set_weights(reference)
    corrected_by_hand(alone, expected)
    return {
        **apart(model, alone),
        "rates": float(np.abs(np.array(rates) - expected).max()),
        "logged": [round(v, 6) for v in history.history["lr"]],
    }


def corrected_by_hand(model, rates):
    """Goyal et al.: v = m * (new / old) * v - new * gradient."""
    velocity, old = [np.zeros(w.shape) for w in model.trainable_variables], rates[0]
    for number, rate in enumerate(rates):
        x, y = (v[number % 3 * 16 :][:16] for v in (X, Y))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        for i, (g, w) in enumerate(zip(gradients, model.trainable_variables, strict=True)):
            velocity[i] = 0.9 * rate / old * velocity[i] - rate * g.numpy()
            w.assign_add(velocity[i])
        old = rate


@case
def built_by_first_batch(_):
    """A model that is built when it is called, on one process only before `fit`."""

    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [layers.Dense(4, "relu"), layers.BatchNormalization(), layers.Dense(3)]

        def call(self, x, training=False):
            for part in self.parts:
                x = part(x, training=training) if "Norm" in type(part).__name__ else part(x)
            return x

    model = Late()
    if hvd.rank() == 0:
        model(X[:2])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(own(X), own(Y), batch_size=8, verbose=0, callbacks=[callback])
    weights = [np.asarray(w) for w in model.trainable_weights]
    return apart(weights, weights)["to_each_other"]


@case
def seeds_stay(_):
    """The broadcast at the start leaves random generators alone."""
    model = keras.Sequential([keras.Input((6,)), layers.Dropout(0.5, seed=hvd.rank())])
    model.add(layers.Dense(3))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(own(X), own(Y), batch_size=8, verbose=0, callbacks=[callback])
    states = hvd.allgather_object(np.asarray(model.layers[0].seed_generator.state).tolist())
    return states[0] != states[1]


@case
def programs_of_keras_2(_):
    """What Horovod's examples write and Keras 3 refuses; and XLA is left off."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = regression()
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.Adam(0.01))
        model.compile(optimizer, "mse", jit_compile=True, experimental_run_tf_function=False)
        model.fit(own(X), own(Y), verbose=0)
    messages = " ".join(str(each.message) for each in caught)
    return {
        "jit_compile": model.jit_compile,
        "variables": len(optimizer.variables()) == len(optimizer.variables),
        "warned": [w in messages for w in ("experimental_run", "legacy.Adam", "jit_compile=True")],
    }


class _Descent(keras.optimizers.Optimizer):
    """An optimizer as Keras 2 had them, without a learning rate of its own."""

    def _resource_apply_dense(self, grad, var, apply_state):
        return var.assign_sub(0.1 * grad)


class _Plain(keras.optimizers.Optimizer):
    """The same as it was before there was a state."""

    def _resource_apply_dense(self, grad, var):
        return var.assign_sub(0.1 * grad)


@case
def old_names(_):
    """An optimizer by the names that Keras 2 had for it."""
    found = {}
    for name, make, options in (
        ("lr", lambda: keras.optimizers.SGD(lr=0.1), {}),
        ("summed", lambda: keras.optimizers.SGD(lr=0.05), {"op": hvd.Sum}),
        ("no_lr", lambda: _Descent("descent"), {}),
        ("no_state", lambda: _Plain("plain"), {}),
    ):
        model, reference = regression(), regression()
        reference.set_weights(same_start(model))
        hvd.broadcast_variables(model.weights, 0)
        optimizer = hvd.DistributedOptimizer(make(), **options)
        if name == "lr":
            optimizer.lr = float(optimizer.lr) * 2
        alone = keras.optimizers.SGD(0.2 if name == "lr" else 0.1)

        @tf.function
        def old_step(x, y, model=model, optimizer=optimizer):
            pairs = optimizer._compute_gradients(
                lambda: tf.reduce_mean((model(x) - y) ** 2), model.trainable_variables
            )
            optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)

        for i in range(0, 48, 16):
            old_step(own(X[i : i + 16]), own(Y[i : i + 16]))
            step(reference, alone, X[i : i + 16], Y[i : i + 16])
        found[name] = apart(model, reference)
    return found


class _Pair(tf.distribute.OneDeviceStrategy):
    """Claims to have two replicas."""

    num_replicas_in_sync = 2


@case
def errors(_):
    model = regression()
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9)), "mse")
    warm = hvd.callbacks.LearningRateWarmupCallback(0.1)
    sgd = keras.optimizers.SGD
    distributed = hvd.DistributedOptimizer(sgd())
    table = keras.Variable(np.zeros((3, 1)))
    rows = tf.IndexedSlices(tf.ones((1, 1)), tf.constant([0]), tf.constant([3, 1]))

    @tf.function(jit_compile=True)
    def compiled():
        with tf.GradientTape() as tape:
            loss = table.value * 2.0
        return hvd.DistributedGradientTape(tape).gradient(loss, [table])

    def scoped():
        with _Pair("CPU:0").scope():
            hvd.DistributedOptimizer(sgd())

    def wrap(**kwargs):
        return lambda: hvd.DistributedOptimizer(kwargs.pop("optimizer", sgd()), **kwargs)

    def endless():
        model.compile(sgd(0.1), "mse")
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        data = data.filter(lambda x, y: True)
        model.fit(data, verbose=0, callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1)])

    def changed():
        optimizer = hvd.DistributedOptimizer(sgd())
        pairs = optimizer._compute_gradients(lambda: tf.reduce_sum(table * 2.0), [table])
        optimizer.apply_gradients([(2 * gradient, variable) for gradient, variable in pairs])

    return {
        "schedule": error_of(lambda: model.fit(X, Y, verbose=0, callbacks=[warm])),
        "endless": error_of(endless),
        "strategy": error_of(scoped),
        "xla": error_of(compiled),
        "twice": error_of(wrap(optimizer=distributed)),
        "name": error_of(wrap(optimizer="adam")),
        "op": error_of(wrap(op=hvd.Max)),
        "predivide": error_of(wrap(op=hvd.Sum, gradient_predivide_factor=2.0)),
        "groups": error_of(wrap(groups=-1)),
        "compression": error_of(wrap(op=hvd.Adasum, compression=hvd.Compression.fp16)),
        "passes": error_of(wrap(backward_passes_per_step=0)),
        "both": error_of(
            wrap(optimizer=sgd(gradient_accumulation_steps=2), backward_passes_per_step=2)
        ),
        "process_set": error_of(
            lambda: wrap(process_set=hvd.ProcessSet([0]))().apply([rows], [table])
        ),
        "sparse_passes": error_of(
            lambda: wrap(backward_passes_per_step=2)().apply([rows], [table])
        ),
        "sparse_adasum": error_of(lambda: wrap(op=hvd.Adasum)().apply([rows], [table])),
        "changed_averages": error_of(changed),
        "get_gradients": error_of(lambda: distributed.get_gradients(table, [table])),
        "no_tape": error_of(lambda: distributed._compute_gradients(tf.constant(1.0), [table])),
        "elastic": error_of(lambda: hvd.elastic),
        "unknown": error_of(lambda: hvd.no_such_name),
    }  # fmt: skip


@case
def uneven(_):
    """`join` lets a process with fewer batches wait; it then adds zeros to the averages."""
    variable = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for _step in range(2 + hvd.rank()):
        optimizer.apply([tf.constant([1.0])], [variable])
    last = int(hvd.join())
    return [last, float(hvd.broadcast(variable, 1)[0])]


SETS: dict[str, Any] = {}


def main(directory: str, names: list[str]) -> None:
    out = pathlib.Path(directory)
    early = error_of(lambda: hvd.DistributedOptimizer(keras.optimizers.SGD()))
    SETS.update(one=hvd.ProcessSet([1]), both=hvd.ProcessSet([0, 1]))
    hvd.init(process_sets=[SETS["one"]])
    file = out / f"rank{hvd.rank()}.json"
    SETS["both"] = hvd.global_process_set
    results: dict[str, Any] = {"before_init": {"value": early}}
    for name in names or CASES:
        started = time.perf_counter()
        try:
            results[name] = {"value": CASES[name](out)}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        print(f"{name} {time.perf_counter() - started:.1f} s", flush=True)
        file.write_text(json.dumps(results))
        if "error" in results[name]:
            print(results[name]["error"], flush=True)
    compiled = keras.Model.compile
    hvd.shutdown()
    results["after_shutdown"] = {"value": keras.Model.compile is not compiled}
    file.write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
