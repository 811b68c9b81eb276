"""A training loop from scratch: a tf.function step on a Keras model, metrics, validation."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.cases.digits import load_digits

digits = load_digits()
x = (digits.data / 16.0).astype("float32")[:170]
y = digits.target[:170].astype("int64")
train = tf.data.Dataset.from_tensor_slices((x[:125], y[:125])).shuffle(125, seed=1).batch(32)
valid = tf.data.Dataset.from_tensor_slices((x[125:], y[125:])).batch(32)

model = keras.Sequential([keras.Input((64,)), layers.Dense(16, "relu"), layers.Dense(10)])
optimizer = keras.optimizers.Adam(0.01)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
train_accuracy = keras.metrics.SparseCategoricalAccuracy()
valid_accuracy = keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_fn(y, logits)
    grads = tape.gradient(loss, model.trainable_weights)
    optimizer.apply(grads, model.trainable_weights)
    train_accuracy.update_state(y, logits)
    return loss


@tf.function
def test_step(x, y):
    valid_accuracy.update_state(y, model(x, training=False))


losses, accuracies = [], []
for _epoch in range(3):
    losses += [float(train_step(*batch)) for batch in train]
    for batch in valid:
        test_step(*batch)
    accuracies += [float(train_accuracy.result()), float(valid_accuracy.result())]
    train_accuracy.reset_state()
    valid_accuracy.reset_state()

RESULT = {
    "losses": losses,
    "accuracies": accuracies,
    "weights": float(sum(np.abs(w).sum() for w in model.get_weights())),
}
