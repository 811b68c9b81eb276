"""Keras, as Horovod's advanced example: warm-up, a plateau, augmentation, sampled validation."""

import argparse

import horovod.keras as hvd
import keras
import numpy as np
import tensorflow as tf

from tests.cases.digits import load_digits

parser = argparse.ArgumentParser(description="Digits")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=1.0)
args = parser.parse_args()

# Start Horovod.
hvd.init()

# One GPU for each process.
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

digits = load_digits()
x = (digits.images[..., None] / 16.0).astype("float32")
y = keras.utils.to_categorical(digits.target, 10)
train, test = np.split(np.random.default_rng(0).permutation(len(x)), [1437])
x_train, x_test, y_train, y_test = x[train], x[test], y[train], y[test]
train_batches = len(x_train) // args.batch_size
test_batches = len(x_test) // args.batch_size

model = keras.Sequential()
model.add(keras.layers.Conv2D(16, kernel_size=(3, 3), activation="relu", input_shape=(8, 8, 1)))
model.add(keras.layers.MaxPooling2D(pool_size=(2, 2)))
model.add(keras.layers.Flatten())
model.add(keras.layers.Dense(32, activation="relu"))
model.add(keras.layers.Dropout(0.2))
model.add(keras.layers.Dense(10, activation="softmax"))

# The learning rate grows with the number of processes.
scaled_lr = args.lr * hvd.size()
opt = hvd.DistributedOptimizer(keras.optimizers.Adadelta(learning_rate=scaled_lr))
model.compile(loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Before callbacks that look at logs.
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2, initial_lr=scaled_lr, verbose=1),
    keras.callbacks.ReduceLROnPlateau(patience=10, verbose=1),
]

# Rank 0 alone writes.
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))

Generator = tf.keras.preprocessing.image.ImageDataGenerator
train_gen = Generator(rotation_range=8, width_shift_range=0.08, zoom_range=0.08)
test_gen = Generator()

# Each process draws its share of batches, and thrice its share for validation.
history = model.fit(
    train_gen.flow(x_train, y_train, batch_size=args.batch_size),
    steps_per_epoch=train_batches // hvd.size(),
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=1 if hvd.rank() == 0 else 0,
    validation_data=test_gen.flow(x_test, y_test, batch_size=args.batch_size),
    validation_steps=3 * test_batches // hvd.size(),
)
score = model.evaluate(x_test, y_test, verbose=0)
print("Test loss:", score[0])
print("Test accuracy:", score[1])
LOSSES = history.history["val_loss"]
