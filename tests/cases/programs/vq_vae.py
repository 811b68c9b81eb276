"""A vector-quantised autoencoder whose codebook follows by moving averages, not by gradients."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.cases.digits import load_digits

x = (load_digits().data / 16.0).astype("float32")[:141]


class Quantizer(layers.Layer):
    def __init__(self, codes, width, decay=0.9):
        super().__init__()
        self.codes, self.width, self.decay = codes, width, decay
        self.book = self.add_weight(
            shape=(codes, width), initializer="random_normal", trainable=False, name="book"
        )
        self.sizes = self.add_weight(
            shape=(codes,), initializer="ones", trainable=False, name="sizes"
        )

    def call(self, inputs, training=False):
        distance = ops.sum((inputs[:, None] - self.book[None]) ** 2, axis=-1)
        hot = ops.one_hot(ops.argmin(distance, axis=1), self.codes)
        quantized = ops.matmul(hot, self.book)
        if training:
            self.sizes.assign(self.decay * self.sizes + (1 - self.decay) * ops.mean(hot, axis=0))
            means = ops.matmul(ops.transpose(hot), inputs) / (ops.sum(hot, axis=0)[:, None] + 1e-3)
            used = ops.cast(ops.sum(hot, axis=0)[:, None] > 0, "float32")
            moved = self.decay * self.book + (1 - self.decay) * means
            self.book.assign(used * moved + (1 - used) * self.book)
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(quantized) - inputs) ** 2))
        return inputs + ops.stop_gradient(quantized - inputs)


class Trainer(keras.Model):
    def __init__(self, network):
        super().__init__()
        self.network = network
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.fit_tracker = keras.metrics.Mean(name="reconstruction_loss")

    @property
    def metrics(self):
        return [self.loss_tracker, self.fit_tracker]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            fit = tf.reduce_mean((x - self.network(x, training=True)) ** 2)
            loss = fit + sum(self.network.losses)
        grads = tape.gradient(loss, self.network.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.network.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        self.fit_tracker.update_state(fit)
        return {m.name: m.result() for m in self.metrics}


quantizer = Quantizer(8, 4)
network = keras.Sequential(
    [
        keras.Input((64,)),
        layers.Dense(16, "relu"),
        layers.Dense(4),
        quantizer,
        layers.Dense(64, "sigmoid"),
    ]
)
trainer = Trainer(network)
trainer.compile(optimizer=keras.optimizers.Adam())
history = trainer.fit(x, epochs=3, batch_size=32, verbose=0)
rebuilt = network.predict(x[:5], verbose=0)

RESULT = {
    **history.history,
    "book": float(np.abs(quantizer.book.numpy()).sum()),
    "rebuilt": float(rebuilt.sum()),
}
