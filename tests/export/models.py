"""Small models of all kinds, made for the tests; also factories for the command line."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers


def convnet() -> Any:
    image = keras.Input((16, 16, 3), name="image")
    x = layers.Conv2D(8, 3, padding="same", name="first")(image)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.ReLU()(x)
    x = layers.MaxPooling2D()(x)
    x = layers.SeparableConv2D(12, 3, activation="relu", name="second")(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(image, layers.Dense(10, activation="softmax", name="head")(x))
    model.get_layer("norm").set_weights([np.linspace(0.5, 1.5, 8)] * 4)
    return model


class Positions(layers.Layer):
    def __init__(self, count: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.table = layers.Embedding(count, width)

    def build(self, shape: Any) -> None:
        self.table.build((None,))

    def call(self, x: Any) -> Any:
        return x + self.table(keras.ops.arange(keras.ops.shape(x)[1]))


def transformer() -> Any:
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = layers.Embedding(50, 16, name="words")(tokens)
    x = Positions(64, 16, name="positions")(x)
    attended = layers.MultiHeadAttention(2, 8, name="attention")(x, x)
    x = layers.LayerNormalization()(x + attended)
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, activation="gelu")(x)))
    return keras.Model(tokens, layers.Dense(4, name="head")(layers.GlobalAveragePooling1D()(x)))


def several() -> Any:
    first, second = keras.Input((4,), name="first"), keras.Input((6,), name="second")
    both = layers.Concatenate()([layers.Dense(8)(first), layers.Dense(8)(second)])
    outputs = {"value": layers.Dense(1)(both), "classes": layers.Dense(3)(both)}
    return keras.Model({"first": first, "second": second}, outputs)


def listed() -> Any:
    first, second = keras.Input((4,), name="b"), keras.Input((4,), name="a")
    return keras.Model(
        [first, second], [layers.Dense(2, name="z")(first), layers.Dense(3, name="y")(second)]
    )


def recurrent(cell: str = "LSTM", masked: bool = True) -> Any:
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = layers.Embedding(30, 8, mask_zero=masked)(tokens)
    x = layers.Bidirectional(getattr(layers, cell)(8, return_sequences=True))(x)
    return keras.Model(tokens, layers.Dense(2, name="head")(getattr(layers, cell)(6)(x)))


def nested() -> Any:
    inner = keras.Sequential(
        [keras.Input((6,)), layers.Dense(6, activation="relu", name="inside")], name="encoder"
    )
    x = keras.Input((6,), name="x")
    twice = inner(inner(x))
    return keras.Model(x, layers.Dense(2, name="outside")(twice))


def sequential() -> Any:
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, activation="gelu"),
            layers.Dropout(0.5),
            layers.Dense(2),
        ]
    )


class TwoArguments(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.one, self.two = layers.Dense(3), layers.Dense(3)

    def call(self, left: Any, right: Any, training: bool = False) -> Any:
        return self.one(left) - self.two(right)


class OfDict(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.one = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.one(x["p"]) + keras.ops.sum(x["q"], axis=1, keepdims=True)


@keras.saving.register_keras_serializable("tfdist_tests")
class Python(layers.Layer):
    """Runs Python code, which cannot be exported."""

    def call(self, x: Any) -> Any:
        return tf.ensure_shape(tf.py_function(lambda a: a * 2, [x], tf.float32), (None, 4))


def with_python() -> Any:
    x = keras.Input((4,))
    return keras.Model(x, layers.Dense(2)(Python(name="own")(layers.Dense(4)(x))))


def with_lookup() -> Any:
    return keras.Sequential(
        [
            keras.Input((1,), dtype="string"),
            layers.StringLookup(vocabulary=["a", "b"], name="words"),
            layers.Embedding(5, 2),
        ]
    )


class Placed(layers.Layer):
    """A layer whose weights and work are on a device of their own."""

    def __init__(self, inner: Any, device: str, **options: Any) -> None:
        super().__init__(**options)
        self.inner, self.device = inner, device

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        with tf.device(self.device):
            return self.inner(x)


def placed(device: str) -> Any:
    x = keras.Input((None, 6), name="x")
    y = Placed(layers.LSTM(8), device)(layers.Dense(6)(x))
    return keras.Model(x, layers.Dense(2)(y))


def no_model() -> Any:
    return 5


def broken() -> Any:
    raise RuntimeError("no weights today")
