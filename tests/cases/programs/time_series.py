"""Forecasting with timeseries_dataset_from_array, early stopping, and a learning rate plateau."""

import keras
import numpy as np
from keras import layers

t = np.arange(260)
series = np.stack([np.sin(t / 7.0), np.cos(t / 11.0), t / 260.0], axis=1).astype("float32")
series += 0.05 * np.random.default_rng(7).normal(size=series.shape).astype("float32")


def windows(start, end, **kwargs):
    return keras.utils.timeseries_dataset_from_array(
        series[start:end], series[start + 12 : end, 0], sequence_length=12, batch_size=32, **kwargs
    )


train = windows(0, 200, shuffle=True, seed=5)
valid = windows(200, 260)

model = keras.Sequential([keras.Input((12, 3)), layers.LSTM(8), layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
callbacks = [
    keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
    keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5),
]
history = model.fit(train, epochs=4, validation_data=valid, callbacks=callbacks, verbose=0)
forecast = model.predict(valid, verbose=0)

RESULT = {**history.history, "forecast": [len(forecast), float(forecast.sum())]}
