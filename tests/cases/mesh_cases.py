"""Cases of a mesh with a model axis: layers that compute with parts of their weights."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tests.cases import common
from tests.cases.common import BATCH, UNEVEN, scope
from tfdist.config.mesh import parse_layouts

layers = keras.layers


def network() -> tuple[keras.Model, Any]:
    """Convolutions, then dense layers by columns and rows, with what stands between them."""
    inputs = keras.Input((8, 8, 1))
    hidden = layers.Conv2D(4, 3, activation="relu")(inputs)
    hidden = layers.Conv2D(6, 3, padding="same", use_bias=False)(hidden)
    hidden = layers.BatchNormalization()(layers.Flatten()(hidden))
    hidden = layers.Dense(16, "gelu")(hidden)
    hidden = layers.Dropout(0.3, seed=5)(hidden)
    hidden = layers.Dense(12)(hidden)
    hidden = layers.Activation("tanh")(layers.Dense(8, use_bias=False)(hidden))
    hidden = layers.LayerNormalization()(layers.Dense(8, "softmax")(hidden))
    hidden = layers.EinsumDense("ab,bcd->acd", (4, 6), bias_axes="cd")(hidden)
    hidden = layers.EinsumDense("acd,cde->ae", (10,), bias_axes="e")(hidden)
    return keras.Model(inputs, layers.Dense(3)(hidden)), common.images(UNEVEN)


def transformer() -> tuple[keras.Model, Any]:
    """Embeddings of tokens and positions, attention with dropout, and a pair of dense layers."""
    inputs = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(20, 8)(inputs) + layers.Embedding(7, 8)(keras.ops.arange(6))
    for number, causal in enumerate((True, False)):
        attention = layers.MultiHeadAttention(4, 2, dropout=0.2 * causal, seed=number)
        mixed = attention(hidden, hidden, use_causal_mask=causal)
        hidden = layers.LayerNormalization()(hidden + mixed)
        wide = layers.Dropout(0.2, seed=7)(layers.Dense(16, "gelu")(hidden))
        hidden = layers.LayerNormalization()(hidden + layers.Dense(8)(wide))
    return _classifier(inputs, hidden)


def groups() -> tuple[keras.Model, Any]:
    """Attention whose keys and values have fewer heads, one of them fewer than there are parts."""
    inputs = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(20, 8, mask_zero=True)(inputs)
    for heads in (2, 1):
        attention = layers.GroupQueryAttention(2, 4, heads)
        hidden = hidden + attention(hidden, hidden)
    return _classifier(inputs, hidden)


def recurrent() -> tuple[keras.Model, Any]:
    """Layers without a rule, and a dense layer that has LoRA weights."""
    inputs = keras.Input((6,), dtype="int32")
    hidden = layers.LSTM(8, return_sequences=True)(layers.Embedding(20, 8)(inputs))
    hidden = layers.TimeDistributed(layers.Dense(6, "relu"))(hidden)
    hidden = layers.Dense(8, lora_rank=2, name="adapted")(hidden)
    return _classifier(inputs, hidden)


def _classifier(inputs: Any, hidden: Any) -> tuple[keras.Model, Any]:
    outputs = layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden))
    return keras.Model(inputs, outputs), common.tokens(UNEVEN)


class Ranker(keras.Model):
    """A model of its own, built by its first batch, which uses two of its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(20, 8, embeddings_regularizer="l2")
        self.wide = layers.Dense(16, "relu")
        self.narrow = layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(0.9))
        self.logits = layers.Dense(2)

    def call(self, ids: Any, training: bool = False) -> Any:
        """Logits of tokens."""
        hidden = self.table(ids)
        for _ in range(2):
            hidden = hidden + self.narrow(self.wide(hidden))
        return self.logits(keras.ops.mean(hidden, axis=1))


def subclassed() -> tuple[keras.Model, Any]:
    """A model without an Input."""
    return Ranker(), common.tokens(UNEVEN)


def adam() -> Any:
    """AdamW that clips by the norm of all gradients."""
    return keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=0.5)


def trained(
    strategy: Any, network: str, policy: str = "float32", epochs: int = 2, optimizer: str = "adam"
) -> dict[str, Any]:
    """Losses, metrics, predictions and weights of a model that has been trained."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(0)
        with scope(strategy):
            model, (x, y) = globals()[network]()
            loss = common.sparse_crossentropy()
            model.compile(globals()[optimizer](), loss, metrics=["accuracy"])
            history = model.fit(x, y, BATCH, epochs, shuffle=False, verbose=0)
            return {
                "history": history.history,
                "evaluated": model.evaluate(x, y, BATCH, verbose=0),
                "predicted": model.predict(x[:40], BATCH, verbose=0),
                "weights": common.weights(model),
                "state": [np.asarray(v) for v in model.optimizer.variables],
            }
    finally:
        keras.config.set_dtype_policy(before)


def sgd() -> Any:
    """Plain steps, whose differences are those of the gradients."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def made_of(strategy: Any, kind: str, layouts: str | None = None) -> str:
    """The error of a model that cannot be divided as it is asked; empty if it trains."""
    strategy.layouts = parse_layouts(layouts)
    try:
        _make(strategy, kind)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.layouts = None
    return ""


class Attentive(keras.Sequential):
    """Asks for the gradients of what lies between its first two layers."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            hidden = keras.ops.tanh(self.layers[0](x))
            loss = self.compute_loss(x, y, self.layers[-1](hidden))
        return {"loss": tf.reduce_sum(tape.gradient(loss, hidden))}


def _make(strategy: Any, kind: str) -> None:
    x, y = common.table(40)
    with scope(strategy):
        make, first = (Attentive, 16) if kind == "outputs" else (keras.Sequential, 15)
        model = make(
            [keras.Input((8,)), layers.Dense(first, name="odd"), layers.Dense(3, name="last")]
        )
        optimizer = keras.optimizers.Lamb() if kind == "lamb" else "adam"
        model.compile(optimizer, common.sparse_crossentropy(), run_eagerly=kind == "eager")
        if kind == "loop":
            _by_hand(strategy, model, x, y)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        if kind == "policy":
            options = tf.data.Options()
            off = tf.data.experimental.AutoShardPolicy.OFF
            options.experimental_distribute.auto_shard_policy = off
            data = data.with_options(options)
        model.fit(data, epochs=1, verbose=0)


def _by_hand(strategy: Any, model: Any, x: Any, y: Any) -> None:
    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model.loss(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    strategy.run(step)


def held(strategy: Any) -> dict[str, Any]:
    """The numbers of each weight that this process keeps and updates, and of the whole one."""
    with scope(strategy):
        model, (x, y) = transformer()
        model.compile(adam(), common.sparse_crossentropy())
        model.fit(x, y, BATCH, 1, verbose=0)

    def numbers(variable: Any, attribute: str) -> int:
        return int(np.prod(getattr(variable, attribute, variable).shape))

    return {
        each.path: [numbers(each, "shard"), numbers(each, "kept"), numbers(each, "whole")]
        for each in model.trainable_weights
    }


def saved(strategy: Any, path: str) -> dict[str, Any]:
    """Weights of a model that was saved after one `fit`, and loaded and trained on."""
    with scope(strategy):
        keras.utils.set_random_seed(0)
        model, (x, y) = groups()
        model.compile(adam(), common.sparse_crossentropy())
        model.fit(x, y, BATCH, 1, shuffle=False, verbose=0)
        before = common.weights(model)
        model.save(path)
        loaded = keras.models.load_model(path)
        after = common.weights(loaded)
        loaded.fit(x, y, BATCH, 1, shuffle=False, verbose=0)
        return {"before": before, "after": after, "on": common.weights(loaded)}


def loaded_by_one_process(strategy: Any, path: str) -> list[np.ndarray]:
    """The weights of a file, as plain Keras reads them."""
    del strategy
    return common.weights(keras.models.load_model(path))


def collectives(strategy: Any) -> dict[str, int]:
    """The gathers and sums that remain of an attention and a pair of dense layers."""
    inputs = keras.Input((6, 8))
    with scope(strategy):
        mixed = layers.MultiHeadAttention(2, 4)(inputs, inputs)
        outputs = layers.Dense(8)(layers.Dropout(0.1, seed=1)(layers.Dense(16, "relu")(mixed)))
        model = keras.Model(inputs, outputs)
        x = tf.zeros([4, 6, 8])

        @tf.function
        def computed() -> Any:
            return strategy.run(lambda: model(x, training=True))

        computed.get_concrete_function()
        own = context.context()
        own.enable_graph_collection()
        try:
            computed()
            graphs = own.export_run_metadata().function_graphs
        finally:
            own.disable_graph_collection()
    nodes = [node.op for graph in graphs for node in graph.post_optimization_graph.node]
    return {kind: nodes.count(f"Collective{kind}V2") for kind in ("Gather", "Reduce")}


class Speaker(keras.Model):
    """Logits of a vocabulary for each of some tokens, computed in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.ReversibleEmbedding(20, 8, mask_zero=True, logit_soft_cap=5.0)
        self.dense = layers.Dense(20)
        self.half = layers.Dense(20, dtype="float16")
        self.softmax = layers.Dense(20, "softmax")

    def build(self, shape: Any) -> None:
        """A number that logits are divided by."""
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def call(self, ids: Any) -> dict[str, Any]:
        """Logits by token and way."""
        hidden = self.table(ids)
        logits = self.dense(hidden)
        return {
            "warm": logits / self.temperature,
            "ignored": logits,
            "weighted": logits + 0.1,
            "summed": -logits,
            "smoothed": logits * 2.0,
            "distributed": keras.ops.tanh(logits),
            "capped": self.table(hidden, reverse=True),
            "tied": keras.ops.matmul(hidden, keras.ops.transpose(self.table.embeddings)),
            "softmax": self.softmax(hidden),
            "half": self.half(hidden),
        }


def entropies(strategy: Any) -> dict[str, Any]:
    """Losses and weights of a model with a cross-entropy for each of its outputs."""
    ids = np.random.default_rng(3).integers(0, 20, (UNEVEN, 6)).astype("int32")
    labels = np.roll(ids, 1, axis=1)
    losses = _entropies()
    targets = dict.fromkeys(losses, labels)
    targets["smoothed"] = np.eye(20, dtype="float32")[labels]
    # Some tokens have no label, others several.
    targets["distributed"] = np.eye(20, dtype="float32")[labels] * (labels % 3)[..., None] / 2
    weights = dict.fromkeys(losses, np.ones((UNEVEN, 6), "float32"))
    weights["weighted"] = np.random.default_rng(4).uniform(0, 2, (UNEVEN, 6)).astype("float32")
    keras.utils.set_random_seed(0)
    with scope(strategy):
        model = Speaker()
        model.compile(
            keras.optimizers.SGD(0.2),
            losses,
            loss_weights={**dict.fromkeys(losses, 1.0), "summed": 0.005, "half": 0.01},
            metrics={"ignored": "accuracy"},
        )
        data = tf.data.Dataset.from_tensor_slices((ids, targets, weights)).batch(BATCH)
        history = model.fit(data, epochs=2, verbose=0)
        return {
            "history": history.history,
            "evaluated": model.evaluate(data, verbose=0),
            "weights": common.weights(model),
        }


def _entropies() -> dict[str, Any]:
    sparse, dense = (
        functools.partial(each, from_logits=True)
        for each in (
            keras.losses.SparseCategoricalCrossentropy,
            keras.losses.CategoricalCrossentropy,
        )
    )
    return {
        "warm": sparse(),
        "ignored": sparse(ignore_class=3),
        "weighted": sparse(reduction="mean_with_sample_weight"),
        "summed": sparse(reduction="sum"),
        "smoothed": dense(label_smoothing=0.1),
        "distributed": dense(),
        "capped": sparse(),
        "tied": sparse(),
        "softmax": keras.losses.SparseCategoricalCrossentropy(),
        "half": sparse(),
    }


def gathers_of_logits(strategy: Any, read: str | None = None) -> dict[str, int]:
    """How often a step with a loss gathers, of all outputs that have one or of one that is read."""
    ids = tf.zeros([4, 6], tf.int32)
    targets = dict.fromkeys(_entropies(), ids)
    targets["smoothed"] = targets["distributed"] = tf.one_hot(ids, 20)
    with scope(strategy):
        model = Speaker()
        model(ids)

        def computed() -> Any:
            with tf.GradientTape() as tape:
                outputs = model(ids, training=True)
                losses = _entropies().items()
                loss = tf.add_n([each(targets[name], outputs[name]) for name, each in losses])
            gradients = tape.gradient(loss, model.trainable_weights)
            return loss, gradients, None if read is None else tf.argmax(outputs[read], -1)

        graph = tf.function(lambda: strategy.run(computed)).get_concrete_function().graph
    nodes = [each for each in graph.get_operations() if each.type == "CollectiveGatherV2"]
    large = [each for each in nodes if each.inputs[0].shape[0] == 4 * 6 * 10]
    return {"of logits": len(large), "others": len(nodes) - len(large)}


def by_keras(strategy: Any, weights_by_batch: bool = False) -> dict[str, Any]:
    """Keras's own example of a model that is divided, on a mesh of all processes."""
    api = keras.distribution
    with scope(strategy):
        keras.utils.set_random_seed(0)
        if strategy is not None:
            devices = api.list_devices()
            mesh = api.DeviceMesh((2, len(devices) // 2), ["batch", "model"], devices)
            layout_map = api.LayoutMap(mesh)
            layout_map[".*dense.*kernel"] = ("batch" if weights_by_batch else None, "model")
            layout_map[".*dense.*bias"] = ("model",)
            layout_map[".*conv2d.*kernel"] = (None, None, None, "model")
            layout_map[".*nothing.*"] = ("model",)
            layout_map[".*dense_1.*output"] = ("batch", None)
            api.set_distribution(api.ModelParallel(layout_map=layout_map, batch_dim_name="batch"))
        try:
            inputs = keras.Input((8, 8, 1))
            hidden = layers.Conv2D(4, 3, activation="relu", name="conv2d")(inputs)
            hidden = layers.Dense(16, "relu", name="dense")(layers.Flatten()(hidden))
            outputs = layers.Dense(4, name="dense_1")(hidden)
            model = keras.Model(inputs, outputs)
        finally:
            api.set_distribution(None)
        x, y = common.images(UNEVEN)
        model.compile(adam(), common.sparse_crossentropy())
        history = model.fit(x, y, BATCH, 2, shuffle=False, verbose=0)
        return {
            "weights": common.weights(model),
            "loss": history.history["loss"],
            "kept": [int(np.prod(getattr(v, "kept", v).shape)) for v in model.weights],
        }


class Noisy(keras.layers.Layer):
    """Draws by an operation of TensorFlow's, which takes the seed of the process."""

    def call(self, x: Any, training: bool = False) -> Any:
        return tf.nn.dropout(x, 0.3) if training else x


def noisy(strategy: Any) -> list[Any]:
    """The weights after a training in which each process has set a seed of its own."""
    keras.utils.set_random_seed(100 + strategy.world.worker)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 16)).astype("float32"), rng.normal(size=(48, 4)).astype("float32")
    with scope(strategy):
        inner = [layers.Dense(64, "relu"), Noisy(), layers.LayerNormalization()]
        model = keras.Sequential([keras.Input((16,)), *inner, layers.Dense(4)])
        model.compile(sgd(), "mse")
        model.fit(x, y, 16, 2, shuffle=False, verbose=0)
        return [np.float32(each) for each in common.weights(model)]


def by_keras_without_parts(strategy: Any, kind: str) -> dict[str, Any]:
    """Programs with a distribution of Keras that divides no weight; stock Keras ignores it."""
    api = keras.distribution
    with scope(strategy):
        if strategy is not None:
            devices = api.list_devices()
            mesh = api.DeviceMesh((1, 1), ["batch", "model"], devices[:1])
            layout_map = api.LayoutMap(mesh)
            layout_map[".*kernel"] = (None, "model")
            by_kind = {
                "data": lambda: api.DataParallel(devices=devices),
                "own data": lambda: api.DataParallel(devices=devices, auto_shard_dataset=False),
                "one device": lambda: api.ModelParallel(
                    layout_map=layout_map, batch_dim_name="batch"
                ),
            }
            api.set_distribution(by_kind[kind]())
        try:
            model = common.dense_model()
        finally:
            api.set_distribution(None)
        model.compile(adam(), common.sparse_crossentropy())
        return common.fitted(model, *common.table(UNEVEN))


def kept_by_keras(strategy: Any) -> dict[str, Any]:
    """The shapes that a process keeps of dense kernels, by rules of a `LayoutMap` that change."""
    api = keras.distribution
    found: dict[str, Any] = {}

    def keep(name: str, units: int = 256) -> None:
        layer = keras.layers.Dense(units, name=name)
        layer.build((None, 64))
        found[name] = tuple(getattr(layer.kernel, "kept", layer.kernel).shape)

    with scope(strategy):
        devices = api.list_devices()
        sizes = [strategy.mesh.size(name) for name in ("data", "model")]
        mesh = api.DeviceMesh(sizes, ["batch", "model"], devices)
        layout_map = api.LayoutMap(mesh)
        layout_map[".*dense.*kernel"] = (None, "model")
        layout_map["dense_a/kernel"] = ("model", None)
        try:
            api.set_distribution(api.ModelParallel(layout_map=layout_map, batch_dim_name="batch"))
            layout_map["late/kernel"] = ("model", None)
            for name in ("dense_a", "dense_b", "late", "other"):
                keep(name)
            found["count"] = api.get_device_count() - len(devices)
            found["same"] = float(api.distribute_tensor(tf.constant(3.0), ("batch",)))
            none = api.LayoutMap(mesh)
            api.set_distribution(api.ModelParallel(layout_map=none, batch_dim_name="batch"))
            keep("unruled")
        finally:
            api.set_distribution(None)
        keep("dense_odd", 255)
        keep("dense_again")
    return found


def refused_by_keras(strategy: Any, sizes: dict[str, int], auto_shard: bool = True) -> str:
    """The error of a distribution of Keras that the strategy cannot follow."""
    api = keras.distribution
    count = int(np.prod(list(sizes.values())))
    devices = [f"cpu:{number}" for number in range(count)]
    with scope(strategy):
        mesh = api.DeviceMesh(tuple(sizes.values()), list(sizes), devices)
        layout_map = api.LayoutMap(mesh)
        try:
            api.set_distribution(
                api.ModelParallel(layout_map=layout_map, auto_shard_dataset=auto_shard)
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            api.set_distribution(None)
    return ""
