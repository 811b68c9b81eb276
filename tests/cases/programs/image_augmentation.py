"""Augmentation layers inside the model, batch normalization and dropout."""

import keras
import numpy as np
from keras import layers

from tests.cases.digits import load_digits

digits = load_digits()
x = digits.images[:150, ..., None].astype("float32")
y = keras.utils.to_categorical(digits.target[:150])

inputs = keras.Input((8, 8, 1))
h = layers.Rescaling(1 / 16.0)(inputs)
h = layers.RandomTranslation(0.1, 0.1)(h)
h = layers.RandomZoom(0.1)(h)
h = layers.SeparableConv2D(8, 3, padding="same")(h)
h = layers.BatchNormalization()(h)
h = layers.Activation("relu")(h)
h = layers.GlobalAveragePooling2D()(h)
h = layers.Dropout(0.3)(h)
model = keras.Model(inputs, layers.Dense(10, "softmax")(h))
model.compile(
    keras.optimizers.Adam(1e-2),
    keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
    metrics=["accuracy", keras.metrics.TopKCategoricalAccuracy(3, name="top3")],
)
history = model.fit(x, y, batch_size=32, epochs=2, verbose=0, validation_data=(x[:37], y[:37]))

RESULT = {
    "loss": history.history["loss"],
    "val_top3": history.history["val_top3"],
    "weights": float(sum(np.abs(w).sum() for w in model.get_weights())),
}
