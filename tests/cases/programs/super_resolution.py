"""Sub-pixel convolution; a callback that predicts and measures PSNR while training."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.cases.digits import load_digits

large = (load_digits().images[:85, ..., None] / 16.0).astype("float32")
small = large.reshape(85, 4, 2, 4, 2, 1).mean((2, 4))


class DepthToSpace(layers.Layer):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def call(self, inputs):
        b, h, w, c = ops.shape(inputs)
        depth = c // self.block**2
        x = ops.reshape(inputs, [b, h, w, self.block, self.block, depth])
        x = ops.transpose(x, axes=[0, 1, 3, 2, 4, 5])
        return ops.reshape(x, [b, h * self.block, w * self.block, depth])


def psnr(y_true, y_pred):
    return tf.image.psnr(y_true, y_pred, max_val=1.0)


class Measure(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.test = small[:5]
        self.values = []

    def on_test_batch_end(self, batch, logs=None):
        self.last = logs["loss"]

    def on_epoch_end(self, epoch, logs=None):
        made = self.model.predict(self.test, verbose=0)
        self.values.append(float(np.mean(psnr(large[:5], made))))


inputs = keras.Input((4, 4, 1))
h = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
h = layers.Conv2D(4, 3, padding="same")(h)
model = keras.Model(inputs, DepthToSpace(2)(h))
model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError(), metrics=[psnr])
measure = Measure()
history = model.fit(
    small[:64],
    large[:64],
    batch_size=12,
    epochs=3,
    callbacks=[measure],
    validation_data=(small[64:], large[64:]),
    verbose=0,
)

RESULT = {**history.history, "psnr_by_callback": measure.values}
