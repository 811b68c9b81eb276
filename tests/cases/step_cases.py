"""Own `train_step`s, several models, and training loops written for `tf.distribute`."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.common import BATCH, UNEVEN, scope
from tfdist.errors import ConfigError, EquivalenceWarning


class HandWrittenMean(keras.Model):
    """A `train_step` that takes the mean of a loss by hand and tracks it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(8, "tanh")
        self.out = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker, self.error]

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(tf.square(tf.cast(y, tf.float32)[:, None] - predicted))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        self.error.update_state(y[:, None], predicted)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        loss = keras.ops.mean((keras.ops.cast(y, "float32")[:, None] - self(x)) ** 2)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "raw": loss}


class InFunctions(HandWrittenMean):
    """A `train_step` whose gradients and clipped update are functions of `tf.function`."""

    @tf.function
    def slopes(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(y, tf.float32)[:, None] - self(x)))
        return loss, tape.gradient(loss, self.trainable_variables)

    @tf.function
    def update(self, gradients: Any) -> Any:
        clipped, norm = tf.clip_by_global_norm(gradients, 0.3)
        self.optimizer.apply_gradients(zip(clipped, self.trainable_variables, strict=True))
        return norm

    def train_step(self, data: Any) -> dict[str, Any]:
        loss, gradients = self.slopes(*data)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "norm": self.update(gradients)}


class CheckedUpdates(HandWrittenMean):
    """Two updates in a step, whose values are checked: TensorFlow runs checks in their order."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                errors = tf.square(tf.cast(y, tf.float32)[:, None] - self(x, training=True))
                with tf.control_dependencies([tf.debugging.assert_less(errors, 1e6)]):
                    loss = tf.reduce_mean(errors)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def _looked_up(table: Any, inputs: Any) -> Any:
    """The mean of a row for each feature, by its sign."""
    ids = keras.ops.cast(inputs > 0, "int32") + 2 * keras.ops.arange(8)
    return keras.ops.mean(table(ids), axis=1)


class LookedUpAgain(CheckedUpdates):
    """A step whose second update looks up rows that the first one has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(300, 4)

    def call(self, inputs: Any) -> Any:
        return super().call(_looked_up(self.table, inputs))


class Lagging(HandWrittenMean):
    """Copies weights at every second update, as its optimizer has counted them by then."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = keras.layers.Dense(8, "tanh", trainable=False)

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs) + self.copy(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        due = keras.ops.equal(self.optimizer.iterations % 2, 0)
        for kept, weight in zip(self.copy.weights, self.hidden.weights, strict=True):
            kept.assign(keras.ops.where(due, weight, kept))
        return logs


class Adversarial(HandWrittenMean):
    """Trains on examples that are moved along the gradient of their loss, and penalizes that."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self._mean(x, y)
        slope, *_ = tape.gradient(loss, [x, *self.trainable_variables])
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = self._mean(x + 3.0 * slope, y)
            steep = tf.reduce_sum(tf.square(inner.gradient(loss, x)))
            loss += 10.0 * steep
        weights = self.trainable_variables
        gradients = self.changed(tape.gradient(loss, weights))
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def changed(self, gradients: Any) -> Any:
        """The gradients that are applied."""
        return gradients

    def _mean(self, x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.cast(y, tf.float32)[:, None] - self(x, training=True)))


class AdversarialClipped(Adversarial):
    """The same, with gradients that are clipped by hand."""

    def changed(self, gradients: Any) -> Any:
        return tf.clip_by_global_norm(gradients, 0.5)[0]


class LookupsClipped(AdversarialClipped):
    """Gradients of rows that are looked up, and of dense weights, clipped by their common norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(300, 4)

    def call(self, inputs: Any) -> Any:
        return super().call(keras.ops.concatenate([_looked_up(self.table, inputs), inputs], 1))

    def changed(self, gradients: Any) -> Any:
        return tf.clip_by_global_norm(gradients, 0.3)[0]


class RunningTargets(HandWrittenMean):
    """Learns labels that running moments standardize; it reads these after it has moved them."""

    def __init__(self) -> None:
        super().__init__()
        make = functools.partial(self.add_weight, trainable=False)
        self.mean = make(initializer="zeros", name="mean")
        self.square = make(initializer="ones", name="square")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y = tf.cast(y, tf.float32) + 2.0 * x[:, 0]
        self.mean.assign(0.8 * self.mean + 0.2 * tf.reduce_mean(y))
        self.square.assign(0.8 * self.square + 0.2 * tf.reduce_mean(y * y))
        deviation = tf.sqrt(tf.maximum(self.square - self.mean**2, 1e-3))
        return super().train_step((x, (y - self.mean) / deviation))


class CurvatureAlong(HandWrittenMean):
    """Corrects gradients by a product of the Hessian with them."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                error = tf.cast(y, tf.float32)[:, None] - self(x, training=True)
                loss = tf.reduce_mean(tf.square(error))
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            along = tf.add_n([tf.reduce_sum(g * tf.stop_gradient(g)) for g in gradients])
        products = outer.gradient(along, weights)
        moves = [g - 0.05 * product for g, product in zip(gradients, products, strict=True)]
        self.optimizer.apply_gradients(zip(moves, weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class ClippedByExample(HandWrittenMean):
    """Clips the gradient of each example, as differentially private training does."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self(x)
        weights = self.trainable_variables

        def clipped(example: Any) -> Any:
            with tf.GradientTape() as tape:
                error = tf.cast(example[1], tf.float32) - self(example[0][None], training=True)
                loss = tf.reduce_sum(tf.square(error))
            return tf.clip_by_global_norm(tape.gradient(loss, weights), 0.5)[0]

        each = tf.vectorized_map(clipped, (x, y))
        means = [tf.reduce_mean(gradient, 0) for gradient in each]
        self.optimizer.apply_gradients(zip(means, weights, strict=True))
        self.tracker.update_state(self._error(x, y))
        return {"loss": self.tracker.result()}

    def _error(self, x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.cast(y, tf.float32)[:, None] - self(x)))


class OfGraph(HandWrittenMean):
    """Takes gradients by `tf.gradients`, of variables and of their values; moves examples first."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        [slope] = tf.gradients(self._mean(x, y), x)
        loss = self._mean(x + 3.0 * tf.stop_gradient(slope), y)
        weights = self.trainable_variables
        first = tf.gradients(loss, weights[0])
        gradients = first + tf.gradients(loss, [weight.value for weight in weights[1:]])
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def _mean(self, x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.cast(y, tf.float32)[:, None] - self(x, training=True)))


class OwnUpdate(HandWrittenMean):
    """A `train_step` that moves the weights itself, without an optimizer."""

    def step_of(self, gradient: Any) -> Any:
        """The change of a weight."""
        return 0.05 * gradient

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((keras.ops.cast(y, "float32")[:, None] - self(x)) ** 2)
        weights = self.trainable_variables
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(self.step_of(gradient))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class TakenBack(OwnUpdate):
    """Steps of a descent that are taken back if they make the loss larger than it was meant to."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y = keras.ops.cast(y, "float32")[:, None]
        self(x)
        before = [tf.identity(weight.value) for weight in self.trainable_variables]
        logs = super().train_step(data)
        loss = keras.ops.mean((y - self(x)) ** 2)
        for weight, old in zip(self.trainable_variables, before, strict=True):
            weight.assign(tf.where(loss > 0.5, 0.7 * old + 0.3 * weight.value, weight.value))
        return {**logs, "after": loss}


class Kept:
    """Variables that a model does not know to be its own."""

    def __init__(self) -> None:
        self.root = keras.Variable(1.0, trainable=False)


class ByLoss(HandWrittenMean):
    """The rate, the gradients and a variable outside of the model depend on the batch's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        root = self.kept.root
        with tf.GradientTape() as tape:
            errors = tf.square(tf.cast(y, tf.float32)[:, None] - self(x, training=True))
            loss = tf.reduce_mean(errors) * root
        weights = self.trainable_variables
        scale = tf.where(loss > 0.5, 0.5, 1.0)
        changed = [
            scale * each + 0.01 * tf.random.stateless_normal(each.shape, [1, 2])
            for each in tape.gradient(loss, weights)
        ]
        self.optimizer.learning_rate.assign(0.1 * tf.minimum(loss, 1.0))
        self.optimizer.apply_gradients(zip(changed, weights, strict=True))
        root.assign(0.9 * root + 0.1 * tf.sqrt(tf.reduce_mean(errors)))
        return {"loss": loss, "root": root.value}


class PlainVariables(HandWrittenMean):
    """A `train_step` that assigns variables of TensorFlow's own, and goes on with their values."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tf.Variable(1.0, trainable=False)
        self.seen = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.square(tf.cast(y, tf.float32)[:, None] - self(x, training=True))
            self.root.assign(0.9 * self.root + 0.1 * tf.sqrt(tf.reduce_mean(errors)))
            loss = tf.reduce_mean(errors) / tf.stop_gradient(self.root)
        self.seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss, "root": self.root + 0.0, "seen": self.seen + 0.0}


class GradientsByHand(HandWrittenMean):
    """Gradients that no tape computes, which add the examples up."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        hidden = self.hidden(x)
        error = self.out(hidden) - tf.cast(y, tf.float32)[:, None]
        pairs = [
            (0.02 * tf.matmul(hidden, error, transpose_a=True), self.out.kernel),
            (0.02 * tf.reduce_sum(error, 0), self.out.bias),
        ]
        self.optimizer.apply_gradients(pairs)
        return {"error": tf.reduce_mean(tf.square(error))}


class OwnNormalizedUpdate(OwnUpdate):
    """Steps that are no linear function of the gradients, in which examples are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.Sequential(
            [self.hidden, keras.layers.PReLU(), keras.layers.LayerNormalization()]
        )

    def step_of(self, gradient: Any) -> Any:
        return 0.02 * gradient / (0.1 + keras.ops.abs(gradient))


class Adversaries(keras.Model):
    """A GAN: two optimizers, no usable `call`; its noise comes with the data."""

    def __init__(self) -> None:
        super().__init__()
        layers = keras.layers
        self.generator = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(8)])
        self.critic = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(1)])
        self.critic_loss = keras.metrics.Mean(name="critic_loss")
        self.generator_loss = keras.metrics.Mean(name="generator_loss")

    def compile(self, critic_optimizer: Any, generator_optimizer: Any) -> None:
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.generator_optimizer = generator_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.critic_loss, self.generator_loss]

    def train_step(self, data: Any) -> dict[str, Any]:
        real, noise = data
        both = keras.ops.concatenate([self.generator(noise), real], axis=0)
        ones = keras.ops.ones((keras.ops.shape(real)[0], 1))
        labels = keras.ops.concatenate([ones, keras.ops.zeros_like(ones)], axis=0)
        with tf.GradientTape() as tape:
            critic_loss = self.loss_fn(labels, self.critic(both))
        self._apply(tape, critic_loss, self.critic, self.critic_optimizer)
        with tf.GradientTape() as tape:
            judged = self.critic(self.generator(noise))
            generator_loss = self.loss_fn(keras.ops.zeros_like(ones), judged)
        self._apply(tape, generator_loss, self.generator, self.generator_optimizer)
        self.critic_loss.update_state(critic_loss)
        self.generator_loss.update_state(generator_loss)
        return {m.name: m.result() for m in self.metrics}

    def _apply(self, tape: Any, loss: Any, part: Any, optimizer: Any) -> None:
        weights = part.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


STEPS = {
    "hand_written_mean": HandWrittenMean,
    "in_functions": InFunctions,
    "checked_updates": CheckedUpdates,
    "looked_up_again": LookedUpAgain,
    "lagging": Lagging,
    "adversarial": Adversarial,
    "of_graph": OfGraph,
    "adversarial_clipped": AdversarialClipped,
    "lookups_clipped": LookupsClipped,
    "running_targets": RunningTargets,
    "curvature_along": CurvatureAlong,
    "clipped_by_example": ClippedByExample,
    "own_update": OwnUpdate,
    "taken_back": TakenBack,
    "by_loss": ByLoss,
    "plain_variables": PlainVariables,
    "gradients_by_hand": GradientsByHand,
    "own_normalized_update": OwnNormalizedUpdate,
}


def own_step(strategy: Any, *, kind: str) -> dict[str, Any]:
    """Fits a model with its own `train_step`, lazily built."""
    x, y = common.table(UNEVEN)
    with scope(strategy):
        model = STEPS[kind]()
        model.compile(keras.optimizers.SGD(0.05))
        return {**common.fitted(model, x, y), "evaluate": common.score(model, x[:45], y[:45])}


def compiled_steps(
    strategy: Any, *, options: dict[str, Any], run_eagerly: bool = False
) -> dict[str, Any]:
    """Trains, evaluates and predicts with steps that are functions of `tf.function`."""
    compiled = tf.function(**options)

    class CompiledSteps(HandWrittenMean):
        train_step = compiled(HandWrittenMean.train_step)
        test_step = compiled(HandWrittenMean.test_step)
        predict_step = compiled(HandWrittenMean.predict_step)

    x, y = common.table(UNEVEN)
    with scope(strategy), warnings.catch_warnings():
        if run_eagerly:  # A loss by hand may be a sum, for all that an eager step shows.
            warnings.simplefilter("ignore", EquivalenceWarning)
        model = CompiledSteps()
        model.compile(keras.optimizers.SGD(0.05), run_eagerly=run_eagerly)
        result = {**common.fitted(model, x, y), "evaluate": common.score(model, x[:45], y[:45])}
        return {**result, "predict": model.predict(x[:45], BATCH, verbose=0)}


def named_by_xla(strategy: Any) -> list[str]:
    """The warnings of a step for XLA."""
    with warnings.catch_warnings(record=True) as caught:
        compiled_steps(strategy, options={"jit_compile": True})
    return [str(each.message) for each in caught if "XLA" in str(each.message)]


class Drawing(keras.layers.Layer):
    """Draws numbers, in training and in inference, that make no difference."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, inputs: Any) -> Any:
        return inputs + 0.0 * keras.random.normal((8,), seed=self.seeds)


def drawn(strategy: Any) -> dict[str, Any]:
    """The state of a generator after training, evaluation and prediction."""
    x, y = common.table(UNEVEN)
    with scope(strategy):
        drawing = Drawing()
        model = keras.Sequential([keras.Input((8,)), drawing, keras.layers.Dense(3)])
        model.compile("sgd", common.sparse_crossentropy())
        model.fit(x, y, BATCH, 2, verbose=0)
        trained = np.asarray(drawing.seeds.state)
        model.evaluate(x, y, BATCH, verbose=0)
        evaluated = np.asarray(drawing.seeds.state)
        model.predict(x, BATCH, verbose=0)
        predicted = np.asarray(drawing.seeds.state)
    return {"trained": trained, "evaluated": evaluated, "predicted": predicted}


def adversaries(strategy: Any, *, optimizer: str) -> dict[str, Any]:
    """Trains a GAN."""
    x, _ = common.table(77)
    noise = np.random.default_rng(8).normal(size=(77, 4)).astype("float32")
    with scope(strategy):
        model = Adversaries()
        model.compile(common.make_optimizer(optimizer), common.make_optimizer(optimizer))
        return common.fitted(model, x, noise)


def several_models(strategy: Any) -> dict[str, Any]:
    """Two models and three fits; the second learns from the first one's predictions."""
    x, y = common.table(77)
    with scope(strategy):
        teacher, student = common.dense_model(), common.lazy_model()
        teacher.compile(keras.optimizers.Adam(0.01), common.sparse_crossentropy())
        first = teacher.fit(x, y, BATCH, 2, shuffle=False, verbose=0)
        logits = teacher.predict(x, BATCH, verbose=0)
        student.compile(keras.optimizers.SGD(0.05), "mse")
        second = student.fit(x, logits, 16, 2, shuffle=False, verbose=0)
        third = teacher.fit(x, y, 16, 1, shuffle=False, verbose=0)
    return {
        "histories": [common.history(h) for h in (first, second, third)],
        "weights": [common.weights(teacher), common.weights(student)],
    }


def fine_tuning(strategy: Any) -> dict[str, Any]:
    """Trains a head on a frozen body, then recompiles and trains all of it."""
    x, y = common.table(77)
    with scope(strategy):
        body = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "relu")])
        body.trainable = False
        inputs = keras.Input((8,))
        model = keras.Model(inputs, keras.layers.Dense(3)(body(inputs, training=False)))
        model.compile(keras.optimizers.Adam(0.01), common.sparse_crossentropy())
        first = model.fit(x, y, BATCH, 2, shuffle=False, verbose=0)
        body.trainable = True
        model.compile("adam", common.sparse_crossentropy(), metrics=["accuracy"])
        second = model.fit(x, y, BATCH, 2, shuffle=False, verbose=0)
    return {
        "histories": [common.history(first), common.history(second)],
        "weights": common.weights(model),
    }


def normalized_kernels(strategy: Any) -> dict[str, Any]:
    """A layer that assigns its trainable kernel in each step, before the optimizer changes it."""
    x, y = common.table(77)
    with scope(strategy):
        normalized = keras.layers.SpectralNormalization(keras.layers.Dense(6))
        model = keras.Sequential([keras.Input((8,)), normalized, keras.layers.Dense(3)])
        model.compile(keras.optimizers.AdamW(0.01, 0.2), common.sparse_crossentropy())
        return common.fitted(model, x, y)


class Gated(keras.layers.Layer):
    """A layer that makes another one when it is built, as it is first called."""

    def build(self, shape: Any) -> None:
        self.dense = keras.layers.Dense(shape[-1], "tanh")
        self.gate = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        return x + self.gate * self.dense(x)


def made_in_the_first_step(strategy: Any) -> dict[str, Any]:
    """Layers that are made within the first step have the program's dtype policy."""
    x, y = common.table(77)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with scope(strategy):
            model = keras.Sequential([Gated(), keras.layers.Dense(3, dtype="float32")])
            model.compile(keras.optimizers.SGD(0.01), common.sparse_crossentropy())
            model.fit(x, y, BATCH, 1, shuffle=False, verbose=0)
            types = [layer.compute_dtype for layer in model._flatten_layers()]
    finally:
        keras.config.set_dtype_policy("float32")
    return {"types": types}


def made_in_the_first_run(strategy: Any, kind: str) -> dict[str, Any]:
    """The same for what `Strategy.run` is given: Python functions and a `tf.function`."""
    strategy = strategy or tf.distribute.get_strategy()
    types: list[str] = []

    def on_replica() -> None:
        types.append(keras.layers.Dense(3).compute_dtype)

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with strategy.scope():
            run = {
                "eager": lambda: strategy.run(on_replica),
                "outer": tf.function(lambda: strategy.run(on_replica)),
                "inner": lambda: strategy.run(tf.function(on_replica)),
            }
            run[kind]()
    finally:
        keras.config.set_dtype_policy("float32")
    return {"types": sorted(set(types))}


def distribute_loop(strategy: Any, synchronized: bool | None = None) -> dict[str, Any]:
    """A training loop written for `tf.distribute`, after TensorFlow's custom training guide.

    With moving statistics of the whole batch or of a replica's own part, or without any.
    """
    strategy = strategy or tf.distribute.get_strategy()
    x, y = common.table(77)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    with strategy.scope():
        model = common.dense_model()
        if synchronized is not None:
            normalization = keras.layers.BatchNormalization(synchronized=synchronized)
            model = keras.Sequential([keras.Input((8,)), normalization, model])
        optimizer = keras.optimizers.Adam(0.01)
        loss_object = common.sparse_crossentropy(reduction="none")
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    distributed = strategy.experimental_distribute_dataset(dataset)

    def train_step(batch: Any) -> Any:
        features, labels = batch
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            each = loss_object(labels, logits)
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        accuracy.update_state(labels, logits)
        return loss

    @tf.function
    def distributed_step(batch: Any) -> Any:
        losses = strategy.run(train_step, args=(batch,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EquivalenceWarning)
        losses = [[float(distributed_step(batch)) for batch in distributed] for _ in range(3)]
    return {
        "losses": losses,
        "weights": common.weights(model),
        "accuracy": float(accuracy.result()),
        "named": [str(w.message) for w in caught if w.category is EquivalenceWarning],
    }


def checked_loop(strategy: Any, *, inside: bool) -> dict[str, Any]:
    """A loop for `tf.distribute` with two updates in a step, whose values are checked.

    Args:
        strategy: what to train on.
        inside: whether the function of a replica is the `tf.function`, not the one around it.
    """
    strategy = strategy or tf.distribute.get_strategy()
    x, y = common.table(77)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    with strategy.scope():
        model = common.dense_model()
        optimizer = keras.optimizers.SGD(0.05)
    loss_object = common.sparse_crossentropy(reduction="none")

    def train_step(features: Any, labels: Any) -> Any:
        weights = model.trainable_variables
        for _ in range(2):
            with tf.GradientTape() as tape:
                each = loss_object(labels, model(features, training=True))
                if tf.reduce_any(each > 1e6):  # AutoGraph's
                    tf.print("large")
                with tf.control_dependencies([tf.debugging.assert_less(each, 1e6)]):
                    loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    if inside:
        run_one = tf.function(train_step)

        def everywhere(batch: Any) -> Any:
            return strategy.run(run_one, args=batch)
    else:

        @tf.function
        def everywhere(batch: Any) -> Any:
            return strategy.run(train_step, args=batch)

    for batch in strategy.experimental_distribute_dataset(dataset):
        everywhere(batch)
    return {"weights": common.weights(model)}


def scaled_loop(strategy: Any, *, form: str, start: int) -> dict[str, Any]:
    """A loop that scales its losses, whose optimizer is built by its first step.

    Args:
        strategy: what to train on.
        form: whether the replicas run the step, or the program calls it itself, as a function of
            its own or eagerly.
        start: the binary logarithm of the first scale.
    """
    strategy = strategy or tf.distribute.get_strategy()
    x, y = common.table(96)
    with strategy.scope():
        model = common.dense_model()
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=2.0**start, dynamic_growth_steps=3
        )
        loss_object = common.sparse_crossentropy()

        def train_step(features: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                # Keras divides it by the replicas, which have the same examples.
                loss = loss_object(labels, model(features, training=True))
                scaled = optimizer.scale_loss(loss)
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(scaled, weights), weights)

        step = train_step
        if form == "replicas":
            step = tf.function(lambda *batch: strategy.run(train_step, batch))
        elif form == "function":
            step = tf.function(train_step)
        for i in range(0, 4 * 96, BATCH):
            step(*(tf.constant(each[i % 96 : i % 96 + BATCH]) for each in (x, y)))
        return {
            "weights": common.weights(model),
            "names": [each.path.partition("/")[2] for each in optimizer.variables],
            "scale": np.log2(float(np.asarray(optimizer.dynamic_scale))),
            "iterations": int(np.asarray(optimizer.iterations)),
        }


def gathered(strategy: Any) -> dict[str, Any]:
    """`strategy.gather` and the reductions, on per-replica values."""
    strategy = strategy or tf.distribute.get_strategy()
    dataset = tf.data.Dataset.range(16).batch(16)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))

    @tf.function
    def double(values: Any) -> Any:
        return strategy.run(lambda v: 2 * v, args=(values,))

    doubled = double(batch)
    sums = strategy.run(tf.function(tf.reduce_sum), args=(doubled,))
    floats = strategy.run(tf.function(lambda v: tf.cast(v, tf.float32)), args=(doubled,))
    return {
        "gathered": np.asarray(strategy.gather(doubled, axis=0)),
        "total": int(strategy.reduce("SUM", sums, axis=None)),
        "mean": float(strategy.reduce("MEAN", floats, axis=0)),
    }


def compiled_with(strategy: Any, *, options: dict[str, Any]) -> dict[str, Any]:
    """Trains with an option that may not work under a strategy: the result, or the error."""
    x, y = common.table(77)
    with scope(strategy):
        model = common.dense_model()
        try:
            model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy(), **options)
            done = common.fitted(model, x, y)
        except ValueError as error:
            return {"error": str(error)}
        score = model.evaluate(x, y, BATCH, verbose=0)
        predicted = model.predict(x, BATCH, verbose=0)
    return {**done, "evaluate": float(score), "predict": predicted}


def stateful(strategy: Any, *, given: str) -> dict[str, Any]:
    """A stateful RNN over sequences that go on from batch to batch, in all ways to run a model.

    Args:
        strategy: what to train on.
        given: "input" has an Input of a fixed batch; "lazy" has none.
    """
    rng = np.random.default_rng(9)
    x, y = rng.normal(size=(24, 3, 2)).astype("float32"), rng.normal(size=(24, 1))
    layers = keras.layers
    first = [keras.Input(batch_shape=(8, 3, 2))] if given == "input" else []
    with scope(strategy):
        rnn = layers.LSTM(5, stateful=True)
        model = keras.Sequential([*first, rnn, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
        done = model.fit(data, epochs=2, verbose=0)
        again = model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
        rnn.reset_state()
        score = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
        predicted = [model.predict(x, batch_size=8, verbose=0) for _ in range(2)]
        predicted.append(np.asarray(model.predict_on_batch(x[:8])))
        trained = [float(np.ravel(model.train_on_batch(x[:8], y[:8]))[0]) for _ in range(3)]
    return {
        "history": [common.history(done), common.history(again)],
        "score": common.numbers(score),
        "predicted": predicted,
        "trained": trained,
        "weights": common.weights(model),
    }


def stateful_one_row(strategy: Any) -> dict[str, Any]:
    """A sequence that is generated by a stateful RNN, one row and one step at a time."""
    with scope(strategy):
        rnn = keras.layers.GRU(4, stateful=True)
        model = keras.Sequential([keras.Input(batch_shape=(1, 1, 3)), rnn, keras.layers.Dense(3)])
        value = np.ones((1, 1, 3), "float32")
        made = []
        for step in range(6):
            if step == 4:
                rnn.reset_state()
            value = model.predict(value, verbose=0)[None]
            made.append(value)
    return {"made": made}


class GathersFirst(keras.Model):
    """A step that gathers the examples of all replicas before any layer is built."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(self.inner(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync > 1:
            data = [context.all_gather(each, axis=0) for each in data]
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def gathered_first(strategy: Any) -> dict[str, Any]:
    """A model whose layers are built when replicas have taken turns."""
    x, _ = common.table(32)
    with scope(strategy):
        model = GathersFirst()
        model.compile(keras.optimizers.SGD(0.05))
        return common.fitted(model, x, x[:, :1])


def stateful_uneven(strategy: Any, *, method: str) -> str:
    """The error of a stateful RNN with batches that replicas cannot share evenly."""
    x, y = np.zeros((9, 3, 2), "float32"), np.zeros((9, 1), "float32")
    with scope(strategy):
        rnn = keras.layers.LSTM(5, stateful=True)
        first = [keras.Input(batch_shape=(4, 3, 2))] if method == "fit" else []
        if method == "fit lazily":
            x, y = x[:6], y[:6]
        model = keras.Sequential([*first, rnn, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        try:
            if method.startswith("fit"):
                model.fit(x, y, batch_size=4 if method == "fit" else 3, verbose=0)
            else:
                getattr(model, method)(*((x,) if "predict" in method else (x, y)))
        except Exception as error:
            return str(error)
    return ""


def quantized(strategy: Any) -> dict[str, Any]:
    """A model of 8-bit weights, tuned by low-rank adapters."""
    x, _ = common.table(77)
    y = np.tanh(0.4 * x.sum(1, keepdims=True)).astype("float32")
    with scope(strategy):
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)]
        )
        model.quantize("int8")
        model.layers[0].enable_lora(2)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return common.fitted(model, x, y)


class Accumulated(keras.Sequential):
    """Adds gradients up by hand, and applies them in a conditional or a loop."""

    def __init__(self, where: str) -> None:
        super().__init__([keras.Input((8,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)])
        self.where = where
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="count"
        )
        self.sums = [
            self.add_weight(shape=w.shape, initializer="zeros", trainable=False, name=f"sum{i}")
            for i, w in enumerate(self.trainable_variables)
        ]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for total, gradient in zip(
            self.sums, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            total.assign_add(gradient)
        if self.where == "condition":
            tf.cond(tf.equal(self.count % 3, 0), self.apply_sums, lambda: None)
        else:
            tf.while_loop(lambda i: i < 2, lambda i: (self.apply_sums(), i + 1)[1:], (0,))
        return {"loss": loss}

    def apply_sums(self) -> None:
        sums = [total / 3.0 for total in self.sums]
        self.optimizer.apply_gradients(zip(sums, self.trainable_variables, strict=True))
        for total in self.sums:
            total.assign(tf.zeros_like(total))


def accumulated(strategy: Any, *, where: str) -> dict[str, Any]:
    """Gradients applied within a "condition" or a "loop", or the error."""
    x, y = common.table(109)
    with scope(strategy):
        model = Accumulated(where)
        model.compile(keras.optimizers.Adam(0.02), "mse")
        try:
            return common.fitted(model, x, y.astype("float32"))
        except ConfigError as error:
            return {"error": str(error)}


class StartsByData(keras.layers.Layer):
    """A bias that the first batch gives its value."""

    def build(self, shape: Any) -> None:
        self.bias = self.add_weight(shape=(shape[-1],), initializer="zeros", name="bias")
        self.begun = self.add_weight(shape=(), initializer="zeros", trainable=False, name="begun")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            mean = keras.ops.mean(inputs, 0)
            self.bias.assign(keras.ops.where(self.begun > 0, self.bias.value, -mean))
            self.begun.assign(1.0)
        return inputs + self.bias


def started_by_data(strategy: Any) -> list[str]:
    """The warnings of a fit with a weight that is trained, and that a step assigns."""
    x, y = common.table(UNEVEN)
    with scope(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(6), StartsByData(), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse")
        common.fitted(model, x, y.astype("float32"))
    return [str(each.message) for each in caught]


def outputs_without_a_loss(strategy: Any) -> dict[str, Any]:
    """Two outputs, of which one has no loss and None for its targets."""
    x, y = common.table(UNEVEN)
    with scope(strategy):
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(6, "tanh")(inputs)
        outputs = {"a": keras.layers.Dense(1, name="a")(hidden), "hidden": hidden}
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.05), {"a": "mse"})
        return common.fitted(model, x, {"a": y.astype("float32"), "hidden": None})
