"""A subclassed autoencoder that denoises digits and is evaluated by its error on each image."""

import keras
import numpy as np
from keras import layers

from tests.cases.digits import load_digits

x = (load_digits().data / 16.0).astype("float32")[:213]
noisy = x + 0.1 * np.random.default_rng(0).normal(size=x.shape).astype("float32")


class Autoencoder(keras.Model):
    def __init__(self, width: int):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(32, "relu"), layers.Dense(width)])
        self.decoder = keras.Sequential([layers.Dense(32, "relu"), layers.Dense(64, "sigmoid")])

    def call(self, inputs):
        return self.decoder(self.encoder(inputs))


model = Autoencoder(6)
model.compile("adam", "mse")
history = model.fit(noisy, x, batch_size=32, epochs=3, shuffle=True, verbose=0)
errors = np.square(model.predict(noisy, verbose=0) - x).mean(1)
codes = model.encoder.predict(x[:9], verbose=0)

RESULT = {
    "loss": history.history["loss"],
    "errors": [float(errors.mean()), float(errors.max())],
    "codes": float(np.abs(codes).sum()),
}
