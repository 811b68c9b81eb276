"""An LSTM encoder and decoder that reverse digit strings, then decode with their own models."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(6)
source = rng.integers(1, 8, (77, 5))
target = source[:, ::-1]
teacher = np.concatenate([np.zeros((77, 1), int), target[:, :-1]], axis=1)


def one_hot(tokens, depth):
    return np.eye(depth, dtype="float32")[tokens]


encoder_inputs = keras.Input((None, 8))
_, state_h, state_c = layers.LSTM(16, return_state=True)(encoder_inputs)
states = [state_h, state_c]
decoder_inputs = keras.Input((None, 8))
decoder = layers.LSTM(16, return_sequences=True, return_state=True)
hidden, _, _ = decoder(decoder_inputs, initial_state=states)
head = layers.Dense(8, "softmax")
model = keras.Model([encoder_inputs, decoder_inputs], head(hidden))
model.compile("rmsprop", "categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    [one_hot(source, 8), one_hot(teacher, 8)],
    one_hot(target, 8),
    batch_size=16,
    epochs=2,
    verbose=0,
)

encoder_model = keras.Model(encoder_inputs, states)
state_inputs = [keras.Input((16,)), keras.Input((16,))]
out, h, c = decoder(decoder_inputs, initial_state=state_inputs)
decoder_model = keras.Model([decoder_inputs, *state_inputs], [head(out), h, c])

state = encoder_model.predict(one_hot(source[:1], 8), verbose=0)
token, decoded = np.zeros((1, 1), int), []
for _ in range(3):
    scores, *state = decoder_model.predict([one_hot(token, 8), *state], verbose=0)
    token = scores.argmax(-1)
    decoded.append(float(scores.max()))

RESULT = {**history.history, "decoded": decoded}
