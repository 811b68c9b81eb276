"""Contrastive pretraining of an encoder with its own steps, then a linear probe."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.cases.digits import load_digits

digits = load_digits()
x = (digits.images[:150, ..., None] / 16.0).astype("float32")
y = digits.target[:150]

encoder = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(8, 3, strides=2, activation="relu"),
        layers.Flatten(),
        layers.Dense(16, "relu"),
    ],
    name="encoder",
)


class Contrastive(keras.Model):
    def __init__(self, encoder):
        super().__init__()
        self.temperature = 0.1
        self.augment = keras.Sequential(
            [layers.RandomTranslation(0.2, 0.2), layers.GaussianNoise(0.1)]
        )
        self.encoder = encoder
        self.projection = keras.Sequential([keras.Input((16,)), layers.Dense(8)])
        self.probe = keras.Sequential([layers.Input((16,)), layers.Dense(10)])

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_tracker = keras.metrics.Mean(name="c_loss")
        self.probe_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.contrastive_tracker, self.probe_tracker, self.probe_accuracy]

    def contrastive_loss(self, first, second):
        first, second = ops.normalize(first, axis=1), ops.normalize(second, axis=1)
        similarity = ops.matmul(first, ops.transpose(second)) / self.temperature
        same = ops.arange(ops.shape(first)[0])
        loss = keras.losses.sparse_categorical_crossentropy(same, similarity, from_logits=True)
        return ops.mean(loss)

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            views = [self.augment(images, training=True) for _ in range(2)]
            loss = self.contrastive_loss(*[self.projection(self.encoder(v)) for v in views])
        weights = self.encoder.trainable_weights + self.projection.trainable_weights
        self.contrastive_optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        self.contrastive_tracker.update_state(loss)
        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(images, training=False), training=True)
            probe_loss = self.probe_loss(labels, logits)
        gradients = tape.gradient(probe_loss, self.probe.trainable_weights)
        self.probe_optimizer.apply_gradients(
            zip(gradients, self.probe.trainable_weights, strict=True)
        )
        self.probe_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        images, labels = data
        logits = self.probe(self.encoder(images, training=False), training=False)
        self.probe_tracker.update_state(self.probe_loss(labels, logits))
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics[1:]}


model = Contrastive(encoder)
model.compile(keras.optimizers.Adam(), keras.optimizers.Adam())
data = tf.data.Dataset.from_tensor_slices((x, y))
history = model.fit(data.batch(32), epochs=2, validation_data=data.take(45).batch(32), verbose=0)

probe = keras.Sequential([encoder, layers.Dense(10)])
encoder.trainable = False
probe.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
probed = probe.fit(x, y, batch_size=32, epochs=1, verbose=0)

RESULT = {**history.history, "probed": probed.history["loss"]}
