"""A convnet on handwritten digits: plain Keras 3, the same file for every strategy.

Run it by one of:

    tfdist run examples/digits.py
    tfdist run --strategy mirrored -n 2 examples/digits.py
    tfdist run --strategy multi_worker -n 2 examples/digits.py
"""

import argparse
import pathlib

import keras
import numpy as np

parser = argparse.ArgumentParser(description="Train a convnet on 1,797 handwritten digits.")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=64, help="the global batch")
parser.add_argument("--save", metavar="FILE.keras", help="where to save the trained model")
args = parser.parse_args()

keras.utils.set_random_seed(0)
digits = np.loadtxt(pathlib.Path(__file__).with_name("digits.csv.gz"), delimiter=",")
images = digits[:, :64].reshape(-1, 8, 8, 1).astype("float32") / 16
labels = digits[:, 64].astype("int32")
train, validation = np.split(np.random.default_rng(0).permutation(len(images)), [1437])

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(momentum=0.9, synchronized=True),
        keras.layers.ReLU(),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.4),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
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
