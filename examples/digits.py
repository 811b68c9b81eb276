"""A convnet on scikit-learn's handwritten digits: plain Keras 3, the same file for every strategy.

Run it by one of:

    tfdist run examples/digits.py
    tfdist run --strategy mirrored -n 2 examples/digits.py
    tfdist run --strategy multi_worker -n 2 examples/digits.py
"""

import argparse

import keras
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Train a convnet on 1,797 handwritten digits.")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=64, help="the global batch")
parser.add_argument("--save", metavar="FILE.keras", help="where to save the trained model")
args = parser.parse_args()

keras.utils.set_random_seed(0)
digits = load_digits()
images = digits.images[..., None].astype("float32") / 16
train, validation = slice(0, 1437), slice(1437, None)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.ReLU(),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    images[train],
    digits.target[train],
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(images[validation], digits.target[validation]),
)
loss, accuracy = model.evaluate(images[validation], digits.target[validation], verbose=0)
if args.save:
    model.save(args.save)
print(f"validation accuracy {accuracy:.2%}, validation loss {loss:.4f}")
