"""A convnet on two devices, each with a part of its layers: `tfdist.place`.

    python examples/two_devices.py

On a machine with GPUs these are used, else two logical CPU devices.
"""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf

import tfdist

parser = argparse.ArgumentParser(description="Train a convnet whose layers are on two devices.")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--map", metavar="FILE.toml", help="a strategy file with a [device_map]")
args = parser.parse_args()

if not tf.config.list_physical_devices("GPU"):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, 2 * [tf.config.LogicalDeviceConfiguration()])

keras.utils.set_random_seed(0)
digits = np.loadtxt(pathlib.Path(__file__).with_name("digits.csv.gz"), delimiter=",")
images = digits[:, :64].reshape(-1, 8, 8, 1).astype("float32") / 16
labels = digits[:, 64].astype("int32")
train, validation = np.split(np.random.default_rng(0).permutation(len(images)), [1437])
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu", name="conv1"),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu", name="conv2"),
        keras.layers.MaxPooling2D(name="pool"),
        keras.layers.Flatten(name="flat"),
        keras.layers.Dense(64, activation="relu", name="dense"),
        keras.layers.Dense(10, activation="softmax", name="head"),
    ]
)
# By hand: {"conv*": "GPU:0", "*": "GPU:1"}. "auto" measures the layers and shows the plan.
tfdist.place(model, args.map or "auto", batch=64)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(images[train], labels[train], batch_size=64, epochs=args.epochs, verbose=2)
loss, accuracy = model.evaluate(images[validation], labels[validation], verbose=0)
devices = {weight.value.device for weight in model.weights}
print(f"validation accuracy {accuracy:.2%}, weights on {len(devices)} devices")
