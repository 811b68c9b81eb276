"""Trains a small convnet on pictures that are made here: plain Keras 3, without a line of tfdist.

Put your own data and your own model in the places that are marked.
"""

import argparse

import keras
import numpy as np

parser = argparse.ArgumentParser(description="Tell the four directions of noisy bars.")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=64, help="the global batch")
parser.add_argument("--save", metavar="FILE.keras", help="where to save the trained model")
args = parser.parse_args()

keras.utils.set_random_seed(0)

# Your data: 2,048 pictures of 12 x 12 pixels, each of a bar at 0, 45, 90 or 135 degrees.
random = np.random.default_rng(0)
labels = random.integers(4, size=2048)
angles = labels[:, None, None] * np.pi / 4
offsets = random.uniform(-2.5, 2.5, (2048, 1, 1))
rows, columns = np.mgrid[-5.5:6, -5.5:6]
bars = np.abs(rows * np.cos(angles) - columns * np.sin(angles) - offsets) < 1
noise = random.normal(0, 0.5, bars.shape)
images = (bars + noise)[..., None].astype("float32")
validation, train = slice(256), slice(256, None)

# Your model.
model = keras.Sequential(
    [
        keras.Input((12, 12, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(4, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    images[train],
    labels[train],
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(images[validation], labels[validation]),
)
loss, accuracy = model.evaluate(images[validation], labels[validation], verbose=0)
if args.save:
    model.save(args.save)
print(f"validation accuracy {accuracy:.2%}, validation loss {loss:.4f}")
