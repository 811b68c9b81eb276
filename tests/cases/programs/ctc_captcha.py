"""A sequence model trained by an endpoint layer that adds its own CTC loss; labels are inputs."""

import keras
import numpy as np
from keras import layers, ops

rng = np.random.default_rng(18)
labels = rng.integers(1, 5, (43, 3))
frames = np.repeat(np.eye(5, dtype="float32")[labels], 3, axis=1)
frames += 0.1 * rng.normal(size=frames.shape).astype("float32")


class CTCLayer(layers.Layer):
    def call(self, y_true, y_pred):
        batch = ops.shape(y_true)[0]
        ones = ops.ones((batch,), "int32")
        each = keras.ops.ctc_loss(y_true, y_pred, 3 * ones, ops.shape(y_pred)[1] * ones)
        self.add_loss(ops.mean(each))
        return y_pred


image = keras.Input((9, 5), name="image")
label = keras.Input((3,), name="label", dtype="int32")
h = layers.Bidirectional(layers.LSTM(6, return_sequences=True))(image)
outputs = CTCLayer(name="ctc")(label, layers.Dense(5)(h))
model = keras.Model([image, label], outputs)
model.compile(keras.optimizers.Adam(0.02))
history = model.fit({"image": frames, "label": labels}, batch_size=8, epochs=2, verbose=0)
reader = keras.Model(model.inputs[0], model.layers[-2].output)
made = reader.predict(frames[:5], verbose=0)

RESULT = {"loss": history.history["loss"], "made": [list(made.shape), float(made.sum())]}
