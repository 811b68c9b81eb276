"""Optimises an image against a network's features: a tf.function loop outside of fit."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

rng = np.random.default_rng(15)
network = keras.Sequential(
    [
        keras.Input((8, 8, 3)),
        layers.Conv2D(6, 3, activation="relu", name="style"),
        layers.Conv2D(6, 3, activation="relu", name="content"),
    ]
)
features = keras.Model(
    network.inputs, {layer.name: layer.output for layer in network.layers}, name="features"
)
content = tf.constant(rng.random((1, 8, 8, 3)), tf.float32)
style = tf.constant(rng.random((1, 8, 8, 3)), tf.float32)
image = tf.Variable(content)
optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.9))


def gram(x):
    flat = tf.reshape(x, (-1, x.shape[-1]))
    return tf.matmul(flat, flat, transpose_a=True)


@tf.function
def compute_loss_and_grads():
    with tf.GradientTape() as tape:
        made, kept, wanted = features(image), features(content), features(style)
        loss = tf.reduce_mean((made["content"] - kept["content"]) ** 2)
        loss += tf.reduce_mean((gram(made["style"]) - gram(wanted["style"])) ** 2)
    return loss, tape.gradient(loss, image)


losses = []
for _ in range(8):
    loss, grads = compute_loss_and_grads()
    optimizer.apply_gradients([(grads, image)])
    losses.append(float(loss))

RESULT = {"losses": losses, "image": float(image.numpy().sum())}
