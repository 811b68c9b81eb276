"""A tfdist peer: `model.fit` under the strategy of TF_CONFIG."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

import tfdist
from bench.two_hosts import data
from bench.two_hosts.clock import Clock
from bench.two_hosts.job import BATCH, BLOCK, PEERS, Job

__all__ = ["train"]

_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(job: Job, clock: Clock) -> None:
    """Trains; the clock takes each block.

    Args:
        job: the job.
        clock: is told when a block begins and ends, and of the loss after it.
    """
    peer = PEERS[job.peer]
    strategy = tfdist.strategy(peer.library, processes=2, **peer.options)
    features, labels = data.examples(job.model, BLOCK * (1 + job.blocks))
    judged = build(job.model)
    rows = tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH[job.model])

    def end(model: Any) -> None:
        clock.stop()
        judged.set_weights(model.get_weights())
        x, y = data.held_out(job.model)
        clock.judge(float(_LOSS(y, judged(x, training=False))))

    with strategy.scope():
        model = build(job.model)
        model.compile(keras.optimizers.Adam(1e-3), _LOSS)
        timing = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_: clock.start(), on_epoch_end=lambda *_: end(model)
        )
        epochs = 1 + job.blocks
        model.fit(rows, epochs=epochs, steps_per_epoch=BLOCK, verbose=0, callbacks=[timing])


def build(name: str) -> Any:
    """A model with its initial weights."""
    model = _mlp() if name == "mlp" else _transformer()
    model.set_weights(data.weights(name))
    return model


def _mlp() -> Any:
    hidden = [layers.Dense(1536, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(10)])


class _Attention(layers.Layer):
    """Attention to what came before, with one matrix for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = layers.Dense(3 * data.WIDTH)
        self.out = layers.Dense(data.WIDTH)

    def call(self, x: Any) -> Any:
        size = data.WIDTH // data.HEADS
        parts = ops.reshape(self.joined(x), (-1, data.LENGTH, 3, data.HEADS, size))
        queries, keys, values = ops.unstack(ops.transpose(parts, (2, 0, 3, 1, 4)), axis=0)
        scores = ops.matmul(queries, ops.transpose(keys, (0, 1, 3, 2))) / size**0.5
        later = ops.triu(ops.ones((data.LENGTH, data.LENGTH)), 1) * -1e9
        mixed = ops.matmul(ops.softmax(scores + later), values)
        return self.out(ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (-1, *x.shape[1:])))


class _Embedding(layers.Layer):
    """Bytes and their places.

    By a product, not a look-up: Keras's Adam squares the rows of a sparse gradient one by one, so
    the peers would not train the same.
    """

    def build(self, shape: Any) -> None:
        """Makes the two tables."""
        self.tokens = self.add_weight(shape=(data.VOCABULARY, data.WIDTH))
        self.places = self.add_weight(shape=(data.LENGTH, data.WIDTH))

    def call(self, x: Any) -> Any:
        """The sums of a byte's row and its place's."""
        return ops.matmul(ops.one_hot(x, data.VOCABULARY), self.tokens) + self.places


def _transformer() -> Any:
    inputs = keras.Input((data.LENGTH,), dtype="int32")
    x = _Embedding()(inputs)
    for _ in range(data.DEPTH):
        x = x + _Attention()(layers.LayerNormalization(epsilon=1e-5)(x))
        hidden = layers.Dense(4 * data.WIDTH, activation="gelu")
        normed = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.Dense(data.WIDTH)(hidden(normed))
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    return keras.Model(inputs, layers.Dense(data.VOCABULARY)(x))
