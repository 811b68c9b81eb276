"""Embeddings of few categories and of positions: rows that repeat in a batch, and in its parts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.cases import common

_OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.05),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
}


def categories(
    strategy: Any, *, vocabulary: int, optimizer: str, batch: int = 4, length: int = 1
) -> dict[str, Any]:
    """Trains an embedding of few categories on batches whose parts often have permuted ids."""
    layers, rng = keras.layers, np.random.default_rng(vocabulary)
    x = rng.integers(0, vocabulary, (48, length)).astype("int32")
    y = rng.normal(size=(48, 1)).astype("float32")
    with common.scope(strategy):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((length,), dtype="int32"),
                layers.Embedding(vocabulary, 4),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        model.compile(_OPTIMIZERS[optimizer](), "mse")
        return common.fitted(model, x, y, batch_size=batch)


class _Places(keras.layers.Layer):
    """Adds an embedding of places, looked up in one of several ways."""

    def __init__(self, table: keras.layers.Embedding, way: str) -> None:
        super().__init__()
        self.table, self.way = table, way

    def call(self, inputs: Any, tokens: Any) -> Any:
        """Adds the rows of the table to the inputs."""
        ops = keras.ops
        places = ops.arange(6) if self.way == "static" else ops.arange(ops.shape(tokens)[1])
        if self.way == "tiled":
            places = ops.tile(places[None], [ops.shape(tokens)[0], 1])
        if self.way == "zeros":
            places = ops.zeros_like(tokens)
        return inputs + self.table(places)


def places(strategy: Any, *, way: str, optimizer: str = "adam") -> dict[str, Any]:
    """Trains tokens and places; `"shared"` looks both up in one table."""
    layers = keras.layers
    x, y = common.tokens(77)
    with common.scope(strategy):
        keras.utils.set_random_seed(4)
        tokens = keras.Input((None,), dtype="int32")
        table = layers.Embedding(20, 4)
        own = table if way == "shared" else layers.Embedding(6, 4)
        hidden = _Places(own, "static" if way == "shared" else way)(table(tokens), tokens)
        hidden = layers.GlobalAveragePooling1D()(hidden)
        model = keras.Model(tokens, layers.Dense(2)(layers.Dense(4, "tanh")(hidden)))
        model.compile(_OPTIMIZERS[optimizer](), common.sparse_crossentropy())
        return common.fitted(model, x, y, batch_size=4, epochs=1)
