"""Models on several devices, in one process that has four logical CPU devices."""

from __future__ import annotations

import collections
import pathlib
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import common
from tfdist._tf.graphs import partitioned_graphs
from tfdist.errors import ConfigError
from tfdist.placement.devices import existing
from tfdist.placement.place import place
from tfdist.placement.plan import plan_placement
from tfdist.placement.units import devices_of, units_of

layers = keras.layers

#: Operations that compute nothing: constants, transfers, a loop's turns. TensorFlow allows values
#: that the gradient of a `tf.while_loop` carries go around by way of the first device.
_ANYWHERE = (
    *("Const", "NoOp", "_Arg", "_Retval", "_HostSend", "_HostRecv", "_Send", "_Recv", "Identity"),
    *("Enter", "Exit", "Merge", "Switch", "NextIteration", "LoopCond"),
)

#: The scope in which the operations of a placed unit are, with the unit's number.
_SCOPE = re.compile(r"placed-(\d+)(?:_\d+)?/")


def devices_by_path(model: keras.Model) -> dict[str, str]:
    """The device of each unit with weights of a placed model."""
    return {u.path: u.variables[0].value.device for u in units_of(model) if u.variables}


def placed_operations(
    model: keras.Model, run: Callable[[], Any]
) -> dict[str, dict[str, list[str]]]:
    """The operations of each layer, forward and backward, by the device that has run them.

    Args:
        model: a placed model.
        run: runs what is looked at, such as a step of training. Only functions that run for the
            first time are seen: it is compiled anew, or not yet trained.

    Returns:
        For each path, for each device, the names of operations in TensorFlow's graph.
    """
    with partitioned_graphs() as graphs:
        run()
    paths = [unit.path for unit in units_of(model)]
    result: dict[str, dict[str, list[str]]] = {
        path: collections.defaultdict(list) for path in paths
    }
    for graph in graphs:
        for node in graph.node:
            scope = _SCOPE.search(node.name)
            if scope is not None and node.op not in _ANYWHERE:
                result[paths[int(scope[1])]][node.device].append(node.name)
    return result


@keras.saving.register_keras_serializable()
class Gated(layers.Layer):
    """A custom layer with layers inside, a loss of its own, and two inputs."""

    def build(self, shape: Any) -> None:
        self.inner = layers.Dense(16, "tanh")
        self.gate = self.add_weight(shape=(16,), initializer="ones", name="gate")
        self.inner.build(shape)

    def call(self, x: Any, other: Any = None, training: bool = False) -> Any:
        self.add_loss(1e-3 * tf.reduce_mean(tf.square(x)))
        mixed = self.inner(x) * self.gate
        return mixed if other is None else mixed + other


def branched() -> keras.Model:
    """A nested encoder that every decoder layer reads, a shared layer, masks and a loop."""
    encoder = keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16, "relu", name="one"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(16, name="two"),
        ],
        name="encoder",
    )
    x, ids = keras.Input((12,)), keras.Input((5,), dtype="int32")
    shared = layers.Dense(16, name="shared", kernel_regularizer="l2")
    read = encoder(x)
    h = layers.Embedding(20, 16, mask_zero=True, name="embedding")(ids)
    h = layers.LSTM(16, name="lstm")(h)
    for i in range(3):
        h = layers.Dense(16, "tanh", name=f"decoder{i}")(h) + shared(read)
    h = Gated(name="gated")(h, other=read)
    return keras.Model([x, ids], layers.Dense(3, name="head")(h))


BRANCHED = {
    "encoder": "cpu:1",
    "embedding": "cpu:0",
    "lstm": "cpu:2",
    "decoder*": "cpu:2",
    "re:shared|gated": "cpu:1",
    "head": "cpu:3",
}


def convolutional() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu", name="conv"),
            layers.MaxPooling2D(name="pool"),
            layers.Flatten(name="flat"),
            layers.Dense(3, name="head"),
        ]
    )


CONVOLUTIONAL = {"conv": "cpu:1", "pool": "cpu:1", "flat": "cpu:1", "head": "cpu:2"}


class Subclassed(keras.Model):
    """Not Functional: its own `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(16, "relu", name="first")
        self.second = layers.Dense(3, name="second")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def subclassed() -> keras.Model:
    model = Subclassed()
    model(np.zeros((1, 12), "float32"))
    return model


MODELS = {
    "branched": (branched, BRANCHED),
    "convolutional": (convolutional, CONVOLUTIONAL),
    "subclassed": (subclassed, {"first": "cpu:3", "second": "cpu:1"}),
}


def data(name: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    if name == "convolutional":
        return common.images(80)
    x = rng.normal(size=(80, 12)).astype("float32")
    y = rng.integers(0, 3, 80)
    return ([x, rng.integers(0, 20, (80, 5))] if name == "branched" else x), y


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=1.0, weight_decay=1e-3)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def apart(first: Any, second: Any) -> float:
    """The largest difference of two lists of arrays or tensors."""
    pairs = zip(map(tf.convert_to_tensor, first), map(tf.convert_to_tensor, second), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def equals_unplaced(strategy: Any, name: str) -> dict[str, Any]:
    """Outputs, gradients and 50 steps of training, beside the same model that is not placed."""
    make, device_map = MODELS[name]
    x, y = data(name)
    plain, placed = make(), make()
    placed.set_weights(plain.get_weights())
    assert place(placed, device_map) is placed
    found = []
    for model in (plain, placed):
        with tf.GradientTape() as tape:
            out = model(x, training=True)
            loss = tf.reduce_sum(out**2) + sum(model.losses)
        found.append(([out], tape.gradient(loss, model.trainable_weights)))
    outputs, gradients = (apart(a, b) for a, b in zip(*found, strict=True))
    fits = [compiled(m).fit(x, y, 16, 10, verbose=0, shuffle=False) for m in (plain, placed)]
    return {
        "outputs": outputs,
        "gradients": gradients,
        "weights": apart(plain.get_weights(), placed.get_weights()),
        "losses": [fit.history["loss"] for fit in fits],
        "evaluated": [m.evaluate(x, y, verbose=0) for m in (plain, placed)],
        "predicted": apart([plain.predict(x, verbose=0)], [placed.predict(x, verbose=0)]),
        "steps": int(placed.optimizer.iterations),
    }


def places_of_operations(strategy: Any, name: str) -> dict[str, Any]:
    """Where a step's operations ran, and where weights and the optimizer's state are."""
    make, device_map = MODELS[name]
    x, y = data(name)
    model = compiled(place(make(), device_map))
    ran = placed_operations(model, lambda: model.fit(x, y, 16, verbose=0))
    wanted = devices_of(units_of(model), device_map)
    weights = {w.path: w.value.device for w in model.weights}
    state = {v.path: v.value.device for v in model.optimizer.variables}
    return {
        "wanted": {path: existing(name) for path, name in wanted.items()},
        "ran": {path: sorted(on) for path, on in ran.items()},
        "backward": [p for p, on in ran.items() if "grad" in str(on)],
        "weights": weights,
        "state": state,
    }


def saved_and_moved(strategy: Any, directory: str) -> dict[str, Any]:
    """An ordinary file, an unplaced model of it, and a model placed again in mid-training."""
    x, y = data("branched")
    plain, placed = branched(), branched()
    placed.set_weights(plain.get_weights())
    compiled(plain).fit(x, y, 16, 2, verbose=0, shuffle=False)
    compiled(place(placed, BRANCHED)).fit(x, y, 16, 1, verbose=0, shuffle=False)
    path = str(pathlib.Path(directory) / "model.keras")
    placed.save(path)
    loaded = keras.models.load_model(path)
    place(placed, {"*": "cpu:0"})
    first = {v.value.device for v in placed.optimizer.variables}
    for model in (placed, loaded):
        model.fit(x, y, 16, 1, verbose=0, shuffle=False)
    return {
        "moved": apart(plain.get_weights(), placed.get_weights()),
        "loaded": apart(plain.get_weights(), loaded.get_weights()),
        "devices": len(first),
    }


def under_single(strategy: Any) -> float:
    """In the scope of `single`, that has a device of its own."""
    from tfdist.strategies.single.strategy import Single

    x, y = data("convolutional")
    plain = convolutional()
    with Single("/CPU:0").scope():
        model = convolutional()
        model.set_weights(plain.get_weights())
        compiled(place(model, CONVOLUTIONAL))
    model.fit(x, y, 16, 2, verbose=0, shuffle=False)
    compiled(plain).fit(x, y, 16, 2, verbose=0, shuffle=False)
    assert model.layers[-1].kernel.value.device.endswith("CPU:2")
    return apart(plain.get_weights(), model.get_weights())


def refused(strategy: Any, name: str, device_map: Any) -> str:
    """What the user is told."""
    try:
        place(MODELS[name][0](), device_map)
    except ConfigError as error:
        return str(error)
    return ""


def refused_unbuilt(strategy: Any) -> str:
    try:
        place(keras.Sequential([layers.Dense(3)]), {"*": "cpu:0"})
    except ConfigError as error:
        return str(error)
    return ""


def refused_without_devices(strategy: Any, devices: Any) -> str:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    try:
        plan_placement(model, 8, devices)
    except ConfigError as error:
        return str(error)
    return ""


def planned(strategy: Any, directory: str) -> dict[str, Any]:
    """A plan by measurement, written and read back."""
    wide = [layers.Dense(512, "relu", name=f"wide{i}") for i in range(4)]
    model = keras.Sequential([keras.Input((512,)), *wide, layers.Dense(3, name="head")])
    plan = plan_placement(model, 64, ["cpu:0", "cpu:1"])
    path = pathlib.Path(directory) / "plan.toml"
    plan.write(path)
    place(model, path)
    tight = plan_placement(model, 64, {"cpu:1": 2**23, "cpu:2": 2**22}, overflow="cpu:0")
    errors = []
    for devices in ({"cpu:1": 2**20}, {"cpu:1": 2**22 * 1.3, "cpu:2": 2**22}):
        try:
            plan_placement(model, 64, devices)
        except ConfigError as error:
            errors.append(str(error))
    return {
        "devices": list(plan.devices.values()),
        "read": [d[-5:].lower() for d in devices_by_path(model).values()],
        "table": plan.table(),
        "costs": [(c.path, c.parameters, c.weight_bytes, c.activation_bytes) for c in plan.costs],
        "positive": all(cost.seconds > 0 for cost in plan.costs),
        "tight": list(tight.devices.values()),
        "errors": errors,
        "places_auto": sorted({d[-5:] for d in devices_by_path(place(model, "auto")).values()}),
    }
