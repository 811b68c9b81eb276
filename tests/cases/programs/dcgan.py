"""A convolutional GAN: its own compile and train_step, no call, a callback that draws."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.cases.digits import load_digits

x = (load_digits().images[:75, ..., None] / 8.0 - 1.0).astype("float32")
LATENT = 6

discriminator = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(8, 4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(1, activation="sigmoid"),
    ]
)
generator = keras.Sequential(
    [
        keras.Input((LATENT,)),
        layers.Dense(4 * 4 * 4),
        layers.Reshape((4, 4, 4)),
        layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2D(1, 5, padding="same", activation="tanh"),
    ]
)


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_metric = keras.metrics.Mean(name="d_loss")
        self.g_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_metric, self.g_metric]

    def train_step(self, real):
        batch = ops.shape(real)[0]
        noise = keras.random.normal((batch, LATENT), seed=self.seed_generator)
        both = ops.concatenate([self.generator(noise), real], axis=0)
        labels = ops.concatenate([ops.ones((batch, 1)), ops.zeros((batch, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(
            zip(grads, self.discriminator.trainable_weights, strict=True)
        )
        noise = keras.random.normal((batch, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros((batch, 1)), judged)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}


class Draw(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.pictures = []

    def on_epoch_end(self, epoch, logs=None):
        noise = keras.random.normal((3, LATENT), seed=epoch)
        self.pictures.append(float(np.abs(self.model.generator(noise)).sum()))


draw = Draw()
gan = GAN(discriminator, generator)
gan.compile(
    keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3), keras.losses.BinaryCrossentropy()
)
data = tf.data.Dataset.from_tensor_slices(x).shuffle(75, seed=1).batch(16)
history = gan.fit(data, epochs=2, callbacks=[draw], verbose=0)

RESULT = {**history.history, "pictures": draw.pictures}
