"""float16 with dynamic loss scaling, set by the global policy."""

import keras
import numpy as np
from keras import layers

from tests.cases.digits import load_digits

keras.mixed_precision.set_global_policy("mixed_float16")
digits = load_digits()
x = (digits.data / 16.0).astype("float32")[:205]
y = digits.target[:205]
model = keras.Sequential(
    [
        keras.Input((64,)),
        layers.Dense(32, "relu"),
        layers.BatchNormalization(),
        layers.Dense(10),
        layers.Activation("softmax", dtype="float32"),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs=3, verbose=0)
keras.mixed_precision.set_global_policy("float32")

RESULT = {
    **history.history,
    "learned": history.history["loss"][-1] < history.history["loss"][0],
    "finite": bool(all(np.isfinite(w).all() for w in model.get_weights())),
}
