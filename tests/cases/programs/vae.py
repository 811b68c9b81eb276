"""A variational autoencoder: its own train_step, a sampling layer, no call."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.cases.digits import load_digits

x = (load_digits().data / 16.0).astype("float32")[:125]


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs):
        mean, log_var = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * noise


inputs = keras.Input((64,))
h = layers.Dense(32, "relu")(inputs)
z_mean, z_log_var = layers.Dense(2)(h), layers.Dense(2)(h)
encoder = keras.Model(inputs, [z_mean, z_log_var, Sampling()([z_mean, z_log_var])])
decoder = keras.Sequential(
    [keras.Input((2,)), layers.Dense(32, "relu"), layers.Dense(64, "sigmoid")]
)


class VAE(keras.Model):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.total = keras.metrics.Mean(name="loss")
        self.kl = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total, self.kl]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            fit = ops.mean(ops.sum(keras.losses.binary_crossentropy(data, reconstruction)))
            kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            kl = ops.mean(ops.sum(kl, axis=1))
            loss = fit + kl
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        self.kl.update_state(kl)
        return {"loss": self.total.result(), "kl_loss": self.kl.result()}


model = VAE(encoder, decoder)
model.compile(optimizer=keras.optimizers.Adam())
history = model.fit(x, epochs=3, batch_size=32, verbose=0)
picture = decoder.predict(np.zeros((3, 2), "float32"), verbose=0)

RESULT = {
    "loss": history.history["loss"],
    "kl_loss": history.history["kl_loss"],
    "picture": float(picture.sum()),
}
