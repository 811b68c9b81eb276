"""Dict inputs of strings and numbers; lookups in the functional model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

rng = np.random.default_rng(1)
n = 107
frame = {
    "city": rng.choice(["Bonn", "Oslo", "Rome"], n),
    "kind": rng.choice(["a", "b", "c", "d"], n),
    "age": rng.normal(40, 10, n).astype("float32"),
}
target = ((frame["city"] == "Oslo") | (frame["age"] > 48)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((frame, target)).shuffle(n, seed=3).batch(16)

inputs, encoded = {}, []
for name in ("city", "kind"):
    inputs[name] = keras.Input((1,), name=name, dtype="string")
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt(frame[name])
    encoded.append(lookup(inputs[name]))
inputs["age"] = keras.Input((1,), name="age")
normalize = layers.Normalization(axis=None)
normalize.adapt(frame["age"])
encoded.append(normalize(inputs["age"]))
h = layers.Dense(8, "relu")(layers.concatenate(encoded))
model = keras.Model(inputs, layers.Dense(1, "sigmoid")(h))
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
history = model.fit(data, epochs=3, verbose=0)
sample = {
    "city": tf.constant([["Oslo"]]),
    "kind": tf.constant([["a"]]),
    "age": tf.constant([[30.0]]),
}

RESULT = {
    "loss": history.history["loss"],
    "accuracy": history.history["accuracy"],
    "sample": float(model.predict(sample, verbose=0)[0, 0]),
}
