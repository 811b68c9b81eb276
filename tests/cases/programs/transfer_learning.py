"""Pretrain, freeze, train a new head, unfreeze, recompile with a low rate."""

import keras
import numpy as np
from keras import layers

from tests.cases.digits import load_digits

digits = load_digits()
x = (digits.images[..., None] / 16.0).astype("float32")
old, new = digits.target[:150] < 5, digits.target[:150] >= 5

base = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(8, 3, use_bias=False),
        layers.BatchNormalization(synchronized=True),
        layers.ReLU(),
        layers.GlobalMaxPooling2D(),
    ],
    name="base",
)
source = keras.Sequential([base, layers.Dense(5)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
source.compile("adam", loss)
pretrained = source.fit(x[:150][old], digits.target[:150][old], 16, 2, verbose=0)

base.trainable = False
inputs = keras.Input((8, 8, 1))
outputs = layers.Dense(5)(base(inputs, training=False))
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
kernel = base.layers[0].kernel.numpy().copy()
head = model.fit(x[:150][new], digits.target[:150][new] - 5, 16, 2, verbose=0)
frozen = bool(np.array_equal(kernel, base.layers[0].kernel.numpy()))

base.trainable = True
model.compile(keras.optimizers.Adam(1e-4), loss, metrics=["accuracy"])
tuned = model.fit(x[:150][new], digits.target[:150][new] - 5, 16, 1, verbose=0)

RESULT = {
    "pretrained": pretrained.history["loss"],
    "head": head.history["loss"],
    "frozen": frozen,
    "tuned": tuned.history["loss"],
    "rate": float(model.optimizer.learning_rate),
}
