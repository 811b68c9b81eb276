"""A convolutional network on handwritten digits, with validation and evaluation."""

import keras
from keras import layers

from tests.cases.digits import load_digits

digits = load_digits()
x = (digits.images[..., None] / 16.0).astype("float32")[:301]
y = digits.target[:301]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(8, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs=3, validation_split=0.2, verbose=0)
loss, accuracy = model.evaluate(x[-45:], y[-45:], verbose=0)
predicted = model.predict(x[:7], verbose=0).argmax(-1)

RESULT = {
    "loss": history.history["loss"],
    "val_accuracy": history.history["val_accuracy"],
    "evaluate": [loss, accuracy],
    "predicted": predicted.tolist(),
}
