"""Matrix factorisation: two embeddings, a dot product, biases, negative sampling in tf.data."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

rng = np.random.default_rng(17)
pairs = np.stack([rng.integers(0, 20, 155), rng.integers(0, 30, 155)], axis=1)
liked = ((pairs[:, 0] + pairs[:, 1]) % 2).astype("float32")


class Factors(keras.Model):
    def __init__(self):
        super().__init__()
        options = {"embeddings_initializer": "he_normal", "embeddings_regularizer": "l2"}
        self.user, self.user_bias = layers.Embedding(20, 5, **options), layers.Embedding(20, 1)
        self.item, self.item_bias = layers.Embedding(30, 5, **options), layers.Embedding(30, 1)

    def call(self, inputs):
        user, item = inputs[:, 0], inputs[:, 1]
        product = ops.sum(self.user(user) * self.item(item), axis=1, keepdims=True)
        return ops.sigmoid(product + self.user_bias(user) + self.item_bias(item))


data = tf.data.Dataset.from_tensor_slices((pairs, liked)).cache().shuffle(155, seed=2).batch(32)
model = Factors()
model.compile(keras.optimizers.Adagrad(0.1), keras.losses.BinaryCrossentropy())
history = model.fit(data, epochs=3, verbose=0)
scores = model.predict(np.array([[0, i] for i in range(30)]), verbose=0).ravel()

RESULT = {"loss": history.history["loss"], "best": scores.argsort()[-3:].tolist()}
