"""A siamese network with triplet loss, its own train_step and test_step."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

rng = np.random.default_rng(4)
centers = rng.normal(size=(5, 10))
kinds = rng.integers(0, 5, 91)
anchor = (centers[kinds] + 1.2 * rng.normal(size=(91, 10))).astype("float32")
positive = (centers[kinds] + 1.2 * rng.normal(size=(91, 10))).astype("float32")
negative = (centers[(kinds + 1) % 5] + 1.2 * rng.normal(size=(91, 10))).astype("float32")
triplets = tf.data.Dataset.from_tensor_slices((anchor, positive, negative))

# The last layer has no bias: distances do not depend on it, and Adam would blow up the noise of
# its zero gradient.
embedding = keras.Sequential(
    [keras.Input((10,)), layers.Dense(16, "relu"), layers.Dense(4, use_bias=False)]
)


class DistanceLayer(layers.Layer):
    def call(self, anchor, positive, negative):
        near = ops.sum(ops.square(anchor - positive), -1)
        far = ops.sum(ops.square(anchor - negative), -1)
        return near, far


names = ("anchor", "positive", "negative")
inputs = [keras.Input((10,), name=name) for name in names]
distances = DistanceLayer()(*[embedding(each) for each in inputs])


class Siamese(keras.Model):
    def __init__(self, network, margin=0.5):
        super().__init__()
        self.network, self.margin = network, margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self._loss(data))
        return {"loss": self.loss_tracker.result()}

    def _loss(self, data):
        near, far = self.network(data)
        return ops.mean(ops.maximum(near - far + self.margin, 0.0))

    @property
    def metrics(self):
        return [self.loss_tracker]


model = Siamese(keras.Model(inputs, distances))
model.compile(optimizer=keras.optimizers.Adam(1e-2), weighted_metrics=[])
history = model.fit(
    triplets.take(70).batch(16), epochs=3, verbose=0, validation_data=triplets.skip(70).batch(16)
)
similarity = keras.metrics.CosineSimilarity()
similarity.update_state(embedding(anchor[:4]), embedding(positive[:4]))

RESULT = {**history.history, "similarity": float(similarity.result())}
