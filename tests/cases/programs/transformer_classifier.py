"""A transformer block, subclassed layers, dropout."""

import keras
import numpy as np
from keras import layers, ops

rng = np.random.default_rng(5)
x = rng.integers(1, 30, (93, 12))
y = (x[:, :6].sum(1) > x[:, 6:].sum(1)).astype("int32")


class TransformerBlock(layers.Layer):
    def __init__(self, width, heads, hidden, rate=0.1):
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width)
        self.feed_forward = keras.Sequential([layers.Dense(hidden, "relu"), layers.Dense(width)])
        self.norm1 = layers.LayerNormalization(epsilon=1e-6)
        self.norm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1, self.dropout2 = layers.Dropout(rate), layers.Dropout(rate)

    def call(self, inputs, training=None):
        attended = self.dropout1(self.attention(inputs, inputs), training=training)
        first = self.norm1(inputs + attended)
        fed = self.dropout2(self.feed_forward(first), training=training)
        return self.norm2(first + fed)


class TokenAndPosition(layers.Layer):
    def __init__(self, length, vocabulary, width):
        super().__init__()
        self.token = layers.Embedding(vocabulary, width)
        self.position = layers.Embedding(length, width)

    def call(self, x):
        return self.token(x) + self.position(ops.arange(0, ops.shape(x)[-1]))


inputs = keras.Input((12,), dtype="int32")
h = TransformerBlock(8, 2, 16)(TokenAndPosition(12, 30, 8)(inputs))
h = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(h))
model = keras.Model(inputs, layers.Dense(2, "softmax")(h))
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x[:27], y[:27]), verbose=0)

RESULT = dict(history.history)
