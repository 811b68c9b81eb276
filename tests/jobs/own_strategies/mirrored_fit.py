"""`fit` on a MirroredStrategy of the program's own: batches, checkpoints, files."""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(7)
images = np.random.rand(160, 8, 8, 1).astype("float32")
labels = (images.mean(axis=(1, 2, 3)) * 1000).astype("int64") % 4

strategy = tf.distribute.MirroredStrategy()
print("Number of devices:", strategy.num_replicas_in_sync)

BATCH_SIZE_PER_REPLICA = int(sys.argv[1])
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


def scale(image, label):
    return tf.cast(image, tf.float32) - 0.5, label


data = tf.data.Dataset.from_tensor_slices((images, labels))
train_dataset = data.take(128).map(scale).cache().shuffle(128, seed=1).batch(BATCH_SIZE)
eval_dataset = data.skip(128).map(scale).batch(BATCH_SIZE)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, activation="relu", input_shape=(8, 8, 1)),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(4),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(),
        metrics=["accuracy"],
    )


def decay(epoch):
    return 1e-2 if epoch < 2 else 1e-3


callbacks = [
    keras.callbacks.ModelCheckpoint("checkpoints/ckpt_{epoch}.weights.h5", save_weights_only=True),
    keras.callbacks.LearningRateScheduler(decay),
]
history = model.fit(train_dataset, epochs=3, callbacks=callbacks, verbose=0)
model.load_weights(os.path.join("checkpoints", "ckpt_3.weights.h5"))
eval_loss, eval_accuracy = model.evaluate(eval_dataset, verbose=0)

model.save("my_model.keras")
unreplicated = keras.models.load_model("my_model.keras")
alone_loss, alone_accuracy = unreplicated.evaluate(eval_dataset, verbose=0)
with strategy.scope():
    replicated = keras.models.load_model("my_model.keras")
    again_loss, _ = replicated.evaluate(eval_dataset, verbose=0)

assert isinstance(replicated, keras.Sequential)
assert sorted(os.listdir("checkpoints")) == [f"ckpt_{i}.weights.h5" for i in (1, 2, 3)]
losses = [*history.history["loss"], eval_loss, alone_loss, again_loss]
print("RESULT", json.dumps([*losses, eval_accuracy, alone_accuracy]))
