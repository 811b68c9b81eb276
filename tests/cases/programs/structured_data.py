"""Feature preprocessing with FeatureSpace, training on preprocessed batches."""

import keras
import numpy as np
import tensorflow as tf
from keras.utils import FeatureSpace

rng = np.random.default_rng(2)
n = 101
frame = {
    "pressure": rng.normal(120, 15, n).astype("float32"),
    "grade": rng.integers(0, 4, n),
    "unit": rng.choice(["x", "y"], n),
}
target = (frame["pressure"] + 8 * frame["grade"] > 132).astype("float32")
train = tf.data.Dataset.from_tensor_slices((frame, target)).batch(16)

space = FeatureSpace(
    features={
        "pressure": FeatureSpace.float_normalized(),
        "grade": FeatureSpace.integer_categorical(num_oov_indices=0),
        "unit": FeatureSpace.string_categorical(num_oov_indices=0),
    },
    crosses=[FeatureSpace.cross(("grade", "unit"), crossing_dim=8)],
    output_mode="concat",
)
space.adapt(train.map(lambda features, _: features))
encoded = space.get_encoded_features()
h = keras.layers.Dense(8, "relu")(encoded)
model = keras.Model(encoded, keras.layers.Dense(1, "sigmoid")(h))
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
history = model.fit(train.map(lambda features, y: (space(features), y)), epochs=3, verbose=0)
whole = keras.Model(space.get_inputs(), model(encoded))
sample = {
    "pressure": tf.constant([[140.0]]),
    "grade": tf.constant([[1]]),
    "unit": tf.constant([["y"]]),
}

RESULT = {
    "loss": history.history["loss"],
    "sample": float(whole.predict(sample, verbose=0)[0, 0]),
}
