"""A small U-Net on made images, fed by a PyDataset with workers."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(10)
images = rng.normal(size=(45, 16, 16, 1)).astype("float32")
masks = np.zeros((45, 16, 16, 1), "uint8")
for image, mask in zip(images, masks, strict=True):
    row, column = rng.integers(2, 10, 2)
    mask[row : row + 4, column : column + 4] = 1
    image[mask.astype(bool)] += 2.0


class Pairs(keras.utils.PyDataset):
    def __init__(self, rows, size=8, **kwargs):
        super().__init__(**kwargs)
        self.rows, self.size = rows, size

    def __len__(self):
        return int(np.ceil(len(self.rows) / self.size))

    def __getitem__(self, index):
        rows = self.rows[index * self.size : (index + 1) * self.size]
        return images[rows], masks[rows]


inputs = keras.Input((16, 16, 1))
down = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
middle = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(down)
up = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(middle)
joined = layers.Add()([up, down])
model = keras.Model(inputs, layers.Conv2D(2, 3, padding="same", activation="softmax")(joined))
model.compile(
    keras.optimizers.Adam(1e-2),
    "sparse_categorical_crossentropy",
    metrics=["accuracy", keras.metrics.MeanIoU(2, sparse_y_pred=False, name="iou")],
)
train, valid = Pairs(np.arange(32)), Pairs(np.arange(32, 45))
history = model.fit(train, epochs=3, validation_data=valid, shuffle=False, verbose=0)
predicted = model.predict(valid, verbose=0)

RESULT = {**history.history, "predicted": [len(predicted), float(predicted[..., 1].sum())]}
