"""Training cases: what `fit`, `evaluate` and `predict` must give on every strategy."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tests.cases.common import BATCH, UNEVEN, scope


def train(
    strategy: Any,
    *,
    model: str = "dense",
    optimizer: str = "sgd",
    options: dict[str, Any] | None = None,
    compiled: dict[str, Any] | None = None,
    examples: int = UNEVEN,
    epochs: int = 5,
    inside: bool = True,
    shuffle: bool = False,
    built: bool = False,
) -> dict[str, Any]:
    """Trains for `10 * epochs` steps of 32 examples, the last of each epoch being uneven.

    Args:
        strategy: what to train on.
        model: a key of `common.MODELS`.
        optimizer: a short name.
        options: options of the optimizer.
        compiled: more arguments of `compile`.
        examples: size of the data set.
        epochs: number of epochs.
        inside: whether `fit` is called in the strategy's scope too, or only the model made there.
        shuffle: as in `fit`.
        built: whether the optimizer is built before `fit`.
    """
    make, data = common.MODELS[model]
    x, y = data(examples)

    def fit() -> dict[str, Any]:
        done = made.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=shuffle, verbose=0)
        return {
            "history": common.history(done),
            "weights": common.weights(made),
            "iterations": int(np.asarray(made.optimizer.iterations)),
        }

    with scope(strategy):
        made = make()
        made.compile(
            common.make_optimizer(optimizer, **(options or {})),
            common.sparse_crossentropy(),
            metrics=["accuracy"],
            **(compiled or {}),
        )
        if built:
            made.optimizer.build(made.trainable_variables)
        if inside:
            return fit()
    return fit()


def regression(
    strategy: Any, *, loss: str, reduction: str = "sum_over_batch_size", weighted: bool = False
) -> dict[str, Any]:
    """Fits with a reduction of the loss, with or without sample weights, on uneven batches."""
    x, y = common.table(UNEVEN)
    sample_weight = np.linspace(0.0, 2.0, UNEVEN).astype("float32") if weighted else None
    kind = {"mse": keras.losses.MeanSquaredError, "huber": keras.losses.Huber}[loss]
    with scope(strategy):
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        rate = 1e-3 if reduction == "sum" else 0.05
        model.compile(
            keras.optimizers.SGD(rate),
            kind(reduction=reduction),
            metrics=["mae"],
            weighted_metrics=["mse"],
        )
        done = common.fitted(model, x, y, sample_weight=sample_weight)
        first = None if sample_weight is None else sample_weight[:45]
        score = common.score(model, x[:45], y[:45], sample_weight=first)
    return {**done, "evaluate": score}


def class_weights(strategy: Any) -> dict[str, Any]:
    """Fits with class weights."""
    x, y = common.table(UNEVEN)
    with scope(strategy):
        model = common.dense_model()
        model.compile("sgd", common.sparse_crossentropy(), weighted_metrics=["accuracy"])
        return common.fitted(model, x, y, class_weight={0: 1.0, 1: 3.0, 2: 0.5})


def masked(strategy: Any, *, per_token: bool) -> dict[str, Any]:
    """Fits an LSTM over a masked embedding: one label a sequence, or one a token."""
    layers = keras.layers
    x, y = common.tokens(77)
    if per_token:
        y = x % 2
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(20, 4, mask_zero=True),
                layers.LSTM(5, return_sequences=per_token),
                layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy(), metrics=["accuracy"])
        done = common.fitted(model, x, y, validation_data=(x[:37], y[:37]))
        return {**done, "predict": model.predict(x[:37], BATCH, verbose=0)}


def masked_but_for_zeros(strategy: Any) -> dict[str, Any]:
    """A mask that keeps zeros, and a last batch of one example: some replicas have none."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2 * BATCH + 1, 5, 2)).astype("float32")
    x[rng.random(x.shape[:2]) < 0.4] = -1.0
    y = x.sum(-1, keepdims=True)
    with scope(strategy):
        layers = [keras.layers.Masking(-1.0), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5, 2)), *layers])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return common.fitted(model, x, y)


def several_outputs(strategy: Any) -> dict[str, Any]:
    """Dict inputs, dict outputs, loss weights, a metric for each, sample weights for one."""
    layers = keras.layers
    x, y = common.table(UNEVEN)
    features = {"left": x[:, :4], "right": x[:, 4:]}
    targets = {"kind": y, "size": x.sum(1, keepdims=True)}
    with scope(strategy):
        inputs = {name: keras.Input((4,), name=name) for name in features}
        hidden = layers.Concatenate()([layers.Dense(6, "tanh")(inputs[name]) for name in features])
        outputs = {
            "kind": layers.Dense(3, name="kind")(hidden),
            "size": layers.Dense(1, name="size")(hidden),
        }
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.05),
            {"kind": common.sparse_crossentropy(), "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.2},
            metrics={"kind": ["accuracy"], "size": ["mae", keras.metrics.RootMeanSquaredError()]},
        )
        done = common.fitted(model, features, targets)
        score = common.score(model, features, targets)
        return {**done, "evaluate": score, "predict": model.predict(features, BATCH, verbose=0)}


class _Penalty(keras.layers.Layer):
    """Adds a loss of its own from what passes through it."""

    def call(self, inputs: Any) -> Any:
        """Adds the mean square of the inputs to the losses."""
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def added_losses(strategy: Any) -> dict[str, Any]:
    """Weight regularizers, an activity regularizer, and `add_loss`."""
    layers, x_y = keras.layers, common.table(UNEVEN)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(8, "relu", kernel_regularizer=keras.regularizers.L2(0.01)),
                layers.Dense(8, "relu", activity_regularizer=keras.regularizers.L2(0.01)),
                _Penalty(),
                layers.Dense(3, bias_regularizer="l1"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), common.sparse_crossentropy())
        return common.fitted(model, *x_y)


def batch_error(y: Any, predicted: Any) -> Any:
    """A metric that is a number for each batch, which Keras averages over the batches."""
    return keras.ops.mean(keras.ops.abs(y - predicted))


def metrics(strategy: Any) -> dict[str, Any]:
    """Metrics that are no means over batches, in fit, validation and evaluate."""
    x, y = common.table(UNEVEN)
    y = y.astype("int64")
    hot = keras.utils.to_categorical(y, 3)
    with scope(strategy):
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3, "softmax")]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(
            keras.optimizers.SGD(0.1),
            "categorical_crossentropy",
            metrics=[
                "accuracy",
                keras.metrics.AUC(num_thresholds=50),
                keras.metrics.TopKCategoricalAccuracy(2, name="top2"),
                keras.metrics.F1Score(average="macro"),
                keras.metrics.Precision(),
                batch_error,
            ],
        )
        done = common.fitted(model, x, hot, validation_data=(x[:45], hot[:45]))
        score = common.score(model, x[:77], hot[:77])
    return {"history": done["history"], "evaluate": score}


class OwnMetrics(keras.Sequential):
    """Returns the results of its metrics from a step of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        """A step of gradient descent."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name != "loss":
                metric.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics if m.name != "loss"}


def metrics_of_classes(strategy: Any, *, own_step: bool) -> dict[str, Any]:
    """A metric whose result is a vector, in `fit`, in what callbacks see, and on one batch."""
    x, y = common.table(UNEVEN)
    hot = keras.utils.to_categorical(y.astype("int64"), 3)
    seen: list[Any] = []
    with scope(strategy):
        made = OwnMetrics if own_step else keras.Sequential
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3, "softmax")]
        model = made([keras.Input((8,)), *layers])
        model.compile(
            keras.optimizers.SGD(0.1),
            "categorical_crossentropy",
            metrics=[keras.metrics.F1Score(average=None)],
        )
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(np.array(logs["f1_score"]))
        )
        done = model.fit(x, hot, BATCH, 2, shuffle=False, verbose=0, callbacks=[note])
        one = model.train_on_batch(x[:BATCH], hot[:BATCH], return_dict=True)
    return {
        "history": [np.array(each) for each in done.history["f1_score"]],
        "seen": seen,
        "one": np.array(one["f1_score"]),
    }


def mixed_precision(
    strategy: Any, *, policy: str, target: float = 1.0, growth: int = 2000, built: bool = True
) -> dict[str, Any]:
    """Trains a regression in mixed precision for 40 steps.

    Args:
        strategy: the strategy to train on.
        policy: a name of a Keras policy.
        target: size of the labels; large ones make scaled gradients overflow.
        growth: finite steps after which the loss scale doubles.
        built: whether the model has an `Input`.
    """
    x, _ = common.table(UNEVEN)
    y = target * x.sum(1, keepdims=True)
    with scope(strategy):
        keras.mixed_precision.set_global_policy(policy)
        try:
            layers = [keras.layers.Dense(16, "relu"), keras.layers.Dense(1, dtype="float32")]
            model = keras.Sequential([*([keras.Input((8,))] if built else []), *layers])
            optimizer: Any = keras.optimizers.Adam(0.02, epsilon=1e-3)
            if policy == "mixed_float16":
                optimizer = keras.optimizers.LossScaleOptimizer(
                    optimizer, dynamic_growth_steps=growth
                )
            model.compile(optimizer, "mse", auto_scale_loss=False)
            done = common.fitted(model, x, y, epochs=4)
        finally:
            keras.mixed_precision.set_global_policy("float32")
        scale = {
            name: float(np.asarray(getattr(model.optimizer, name, 0.0)))
            for name in ("dynamic_scale", "step_counter", "iterations")
        }
    return {**done, "scale": scale}


def loss_scale(strategy: Any, *, start: float, growth: int) -> dict[str, Any]:
    """Trains float32 weights for 20 steps with a loss scale that overflows at first, or grows."""
    x, y = common.table(UNEVEN)
    with scope(strategy):
        model = common.dense_model()
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9),
            initial_scale=start,
            dynamic_growth_steps=growth,
        )
        model.compile(optimizer, common.sparse_crossentropy(), metrics=["accuracy"])
        done = common.fitted(model, x, y)
    return {
        **done,
        "scale": float(np.asarray(optimizer.dynamic_scale)),
        "counter": int(np.asarray(optimizer.step_counter)),
        "iterations": int(np.asarray(optimizer.iterations)),
    }


def saved(strategy: Any, *, directory: str) -> dict[str, Any]:
    """Trains, saves, loads, evaluates what was loaded, and trains that.

    Args:
        strategy: the strategy to train on.
        directory: one that all processes and strategies share.
    """
    x, y = common.table(77)
    path = f"{directory}/{'plain' if strategy is None else type(strategy).__name__}.keras"
    with scope(strategy):
        model = common.dense_model()
        adam = keras.optimizers.Adam(0.01)
        model.compile(adam, common.sparse_crossentropy(), metrics=["accuracy"])
        model.fit(x, y, BATCH, 1, shuffle=False, verbose=0)
        model.save(path)
        loaded = keras.models.load_model(path)
        score = common.score(loaded, x, y)
        done = common.fitted(loaded, x, y, epochs=1)
    return {
        "evaluate": score,
        "history": done["history"],
        "weights": [common.weights(model), done["weights"]],
        "iterations": int(np.asarray(loaded.optimizer.iterations)),
    }


def dropout_masks(strategy: Any) -> dict[str, Any]:
    """One step on two equal examples; each weight then tells how many of the two kept its unit."""
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((1000,)),
                keras.layers.Dropout(0.5, seed=1),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        model.compile(keras.optimizers.SGD(1.0), lambda y_true, y_pred: y_pred)
        model.fit(np.ones((2, 1000), "float32"), np.zeros((2, 1)), 2, 1, verbose=0)
    return {"weights": common.weights(model)}


def local_statistics(strategy: Any) -> dict[str, Any]:
    """Weights on every replica after training with BatchNormalization that is not synchronised."""
    x, y = common.images(77)
    with scope(strategy):
        model = common.conv_model(synchronized=False)
        model.compile("sgd", common.sparse_crossentropy())
        model.fit(x, y, BATCH, 2, shuffle=False, verbose=0)
    values = [_on_each_replica(strategy, w.value) for w in model.weights]
    return {"replicas": [list(one) for one in zip(*values, strict=True)]}


def _on_each_replica(strategy: Any, value: Any) -> list[np.ndarray]:
    if strategy is None:
        return [np.asarray(value)]
    return [np.asarray(v) for v in strategy.experimental_local_results(value)]


def variables_as_numbers(strategy: Any) -> dict[str, Any]:
    """Variables used as Python and NumPy numbers, as scripts do."""
    with scope(strategy):
        model = common.dense_model()
        model.compile(keras.optimizers.Adam(0.01), common.sparse_crossentropy())
        model.fit(*common.table(40), BATCH, 1, verbose=0)
        optimizer = model.optimizer
        return {
            "float": float(optimizer.learning_rate),
            "int": int(optimizer.iterations),
            "bool": bool(optimizer.iterations > 0),
            "numpy": optimizer.learning_rate.numpy(),
            "array": np.asarray(model.layers[0].kernel),
            "sum": float(np.sum(model.layers[0].kernel)),
            "ops": keras.ops.convert_to_numpy(model.layers[0].bias),
            "format": f"{float(optimizer.learning_rate):.3f}",
            "text": "value=" in repr(optimizer.learning_rate),
        }


class _Table(keras.layers.Layer):
    """One table for tokens and positions, or a lookup of positions as the batch is long."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding = keras.layers.Embedding(12, 4, embeddings_initializer=_ramp)

    def call(self, ids: Any) -> Any:
        """Looks rows of shape (batch, length, 4) up."""
        if self.how == "tokens":
            return self.embedding(ids)
        positions = tf.range(tf.shape(ids)[1])
        if self.how == "concatenated":
            both = self.embedding(tf.concat([tf.reshape(ids, [-1]), positions], 0))
            here = tf.size(ids)
            return tf.reshape(both[:here], [-1, tf.shape(ids)[1], 4]) + both[here:]
        return self.embedding(ids) + self.embedding(positions)


def _ramp(shape: Any, dtype: Any = None) -> Any:
    return keras.ops.reshape(keras.ops.arange(48, dtype=dtype) / 48.0, shape)


def lookups(
    strategy: Any, *, how: str, vocabulary: int = 2, optimizer: str = "Adam", batch: int = 8
) -> dict[str, Any]:
    """Trains a table that few ids are looked up in, for 2 epochs of uneven batches.

    Args:
        strategy: the strategy to train on.
        how: tokens only; tokens and positions by two lookups, or by one.
        vocabulary: number of ids; with 1 or 2 the ids of all replicas are often equal.
        optimizer: the name of one that squares gradients.
        batch: the size of a batch, of which the last one has three examples.
    """
    rng = np.random.default_rng(4)
    x = rng.integers(0, vocabulary, (3 * batch + 3, 1 if how == "tokens" else 3)).astype("int32")
    y = rng.normal(size=(len(x), 1)).astype("float32")
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                _Table(how),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1, kernel_initializer="ones"),
            ]
        )
        model.compile(getattr(keras.optimizers, optimizer)(0.05), "mse")
        return common.fitted(model, x, y, batch_size=batch)
