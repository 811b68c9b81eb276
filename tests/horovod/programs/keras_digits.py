"""Keras, as Horovod's TensorFlow 2 example: optimizer, callbacks, checkpoints of rank 0."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from tensorflow.keras.optimizers import legacy as optimizers

from tests.cases.digits import load_digits

# Start Horovod.
hvd.init()

# One GPU for each process.
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

digits = load_digits()
dataset = tf.data.Dataset.from_tensor_slices(
    (
        tf.cast(digits.images[..., tf.newaxis] / 16.0, tf.float32),
        tf.cast(digits.target, tf.int64),
    )
)
dataset = dataset.repeat().shuffle(2000).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)

# The learning rate grows with the number of processes.
scaled_lr = 0.002 * hvd.size()
opt = optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)

model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)

callbacks = [
    # Every process starts with rank 0's weights.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Logs are those of all processes.
    hvd.callbacks.MetricAverageCallback(),
    # The learning rate starts as that of one process.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]

# Rank 0 alone writes.
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))
verbose = 1 if hvd.rank() == 0 else 0

history = model.fit(
    dataset, steps_per_epoch=60 // hvd.size(), callbacks=callbacks, epochs=4, verbose=verbose
)
LOSSES = history.history["loss"]
