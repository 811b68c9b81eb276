"""Wasserstein GAN with gradient penalty: nested tapes and several critic updates a step."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

x = np.random.default_rng(3).normal([2.0, -1.0], 0.3, (75, 2)).astype("float32")

critic = keras.Sequential([keras.Input((2,)), layers.Dense(16, "relu"), layers.Dense(1)])
generator = keras.Sequential([keras.Input((3,)), layers.Dense(16, "relu"), layers.Dense(2)])


class WGAN(keras.Model):
    def __init__(self, critic, generator, critic_steps=2, penalty=10.0):
        super().__init__()
        self.critic, self.generator = critic, generator
        self.critic_steps, self.penalty = critic_steps, penalty

    def compile(self, c_optimizer, g_optimizer):
        super().compile()
        self.c_optimizer, self.g_optimizer = c_optimizer, g_optimizer

    def gradient_penalty(self, batch, real, fake):
        alpha = tf.random.uniform([batch, 1])
        mixed = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            score = self.critic(mixed, training=True)
        norm = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(score, mixed)), axis=1) + 1e-12)
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real):
        if isinstance(real, tuple):
            real = real[0]
        batch = tf.shape(real)[0]
        for _ in range(self.critic_steps):
            noise = tf.random.normal((batch, 3))
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                cost = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real))
                c_loss = cost + self.penalty * self.gradient_penalty(batch, real, fake)
            grads = tape.gradient(c_loss, self.critic.trainable_variables)
            self.c_optimizer.apply_gradients(
                zip(grads, self.critic.trainable_variables, strict=True)
            )
        with tf.GradientTape() as tape:
            fake = self.generator(tf.random.normal((batch, 3)), training=True)
            g_loss = -tf.reduce_mean(self.critic(fake))
        grads = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(
            zip(grads, self.generator.trainable_variables, strict=True)
        )
        return {"c_loss": c_loss, "g_loss": g_loss}


wgan = WGAN(critic, generator)
wgan.compile(keras.optimizers.Adam(1e-3, 0.5), keras.optimizers.Adam(1e-3, 0.5))
history = wgan.fit(x, batch_size=16, epochs=2, verbose=0)

RESULT = dict(history.history)
