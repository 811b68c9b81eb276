"""A small GPT with a callback that samples text by predict after each epoch."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

text = "the cat sat on the mat and the dog sat on the log while the owl sat in the oak "
letters = sorted(set(text))
codes = np.array([letters.index(c) for c in text * 4])
LENGTH = 10


def to_batch(window):
    return window[:, :-1], window[:, 1:]


data = tf.data.Dataset.from_tensor_slices(codes).window(LENGTH + 1, shift=7, drop_remainder=True)
data = data.flat_map(lambda w: w.batch(LENGTH + 1)).batch(16).map(to_batch)
# Keras counts one step too many at the end of data of unknown length, which Adam notices.
windows = (len(codes) - LENGTH - 1) // 7 + 1
data = data.apply(tf.data.experimental.assert_cardinality(-(-windows // 16)))


def causal_block(h, width, heads):
    attended = layers.MultiHeadAttention(heads, width)(h, h, use_causal_mask=True)
    h = layers.LayerNormalization()(h + attended)
    return layers.LayerNormalization()(h + layers.Dense(width, "relu")(h))


class Positions(layers.Layer):
    def __init__(self, width):
        super().__init__()
        self.embedding = layers.Embedding(LENGTH, width)

    def call(self, h):
        return h + self.embedding(ops.arange(ops.shape(h)[1]))


inputs = keras.Input((LENGTH,), dtype="int32")
h = Positions(16)(layers.Embedding(len(letters), 16)(inputs))
model = keras.Model(inputs, layers.Dense(len(letters))(causal_block(h, 16, 2)))
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class Sampler(keras.callbacks.Callback):
    def __init__(self, start):
        super().__init__()
        self.start, self.texts = start, []

    def on_epoch_end(self, epoch, logs=None):
        tokens = [letters.index(c) for c in self.start]
        for _ in range(3):
            window = np.zeros((1, LENGTH), "int32")
            window[0, : len(tokens)] = tokens
            logits = self.model.predict(window, verbose=0)[0, len(tokens) - 1]
            tokens.append(int(logits.argmax()))
        self.texts.append("".join(letters[t] for t in tokens))


sampler = Sampler("the")
history = model.fit(data, epochs=2, callbacks=[sampler], verbose=0)

RESULT = {"loss": history.history["loss"], "texts": sampler.texts}
