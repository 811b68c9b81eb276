"""Q-learning from a replay memory: predict_on_batch, train_on_batch, a target network."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(13)


def network():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(16, "relu"), layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.Huber())
    return model


online, target = network(), network()
target.set_weights(online.get_weights())
memory = [
    (rng.normal(size=4), int(rng.integers(2)), float(rng.normal()), rng.normal(size=4))
    for _ in range(60)
]
losses = []
for step in range(12):
    picks = rng.choice(60, 7 if step % 3 == 2 else 16, replace=False)
    states = np.array([memory[i][0] for i in picks], "float32")
    following = np.array([memory[i][3] for i in picks], "float32")
    wanted = np.array(online.predict_on_batch(states))
    best = np.asarray(target.predict_on_batch(following)).max(1)
    for row, i in enumerate(picks):
        wanted[row, memory[i][1]] = memory[i][2] + 0.9 * best[row]
    losses.append(float(np.ravel(online.train_on_batch(states, wanted))[0]))
    if step % 5 == 4:
        target.set_weights(online.get_weights())
tested = float(np.ravel(online.test_on_batch(states, wanted))[0])

RESULT = {"losses": losses, "tested": tested}
