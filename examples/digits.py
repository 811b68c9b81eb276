"""A convnet on scikit-learn's handwritten digits: plain Keras 3, the same file for every strategy.

Run it by one of:

    tfdist run examples/digits.py
    tfdist run --strategy mirrored -n 2 examples/digits.py
    tfdist run --strategy multi_worker -n 2 examples/digits.py
"""

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

parser = argparse.ArgumentParser(description="Train a convnet on 1,797 handwritten digits.")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=64, help="the global batch")
parser.add_argument("--save", metavar="FILE.keras", help="where to save the trained model")
args = parser.parse_args()

keras.utils.set_random_seed(0)
digits = load_digits()
images = digits.images[..., None].astype("float32") / 16
x_train, x_validation, y_train, y_validation = train_test_split(
    images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
)

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
    x_train,
    y_train,
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(x_validation, y_validation),
)
loss, accuracy = model.evaluate(x_validation, y_validation, verbose=0)
if args.save:
    model.save(args.save)
print(f"validation accuracy {accuracy:.2%}, validation loss {loss:.4f}")
