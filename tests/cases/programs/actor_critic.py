"""Actor and critic on a made task: a Python loop with GradientTape, no fit."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

rng = np.random.default_rng(12)
inputs = keras.Input((3,))
common = layers.Dense(16, "relu")(inputs)
model = keras.Model(inputs, [layers.Dense(2, "softmax")(common), layers.Dense(1)(common)])
optimizer = keras.optimizers.Adam(0.01)
huber = keras.losses.Huber()

totals, losses = [], []
for _episode in range(4):
    state = rng.normal(size=3).astype("float32")
    log_probabilities, values, rewards = [], [], []
    with tf.GradientTape() as tape:
        for _ in range(6):
            probabilities, value = model(ops.expand_dims(ops.convert_to_tensor(state), 0))
            p = np.squeeze(np.asarray(probabilities))
            action = int(rng.random() > p[0])
            log_probabilities.append(ops.log(probabilities[0, action]))
            values.append(value[0, 0])
            rewards.append(float(state[action] - state[1 - action]))
            state = (0.5 * state + rng.normal(size=3)).astype("float32")
        returns = np.cumsum(rewards[::-1])[::-1]
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        terms = []
        for log_probability, value, target in zip(log_probabilities, values, returns, strict=True):
            terms.append(-log_probability * (target - value))
            terms.append(huber(ops.expand_dims(value, 0), ops.expand_dims(target, 0)))
        loss = sum(terms)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    totals.append(float(sum(rewards)))
    losses.append(float(loss))

RESULT = {
    "totals": totals,
    "losses": losses,
    "weights": float(sum(np.abs(w).sum() for w in model.get_weights())),
}
