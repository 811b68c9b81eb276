"""Images per second with a loop by hand, as Horovod's benchmark."""

import timeit

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

# Start Horovod.
hvd.init()

model = tf.keras.Sequential(
    [
        layers.Conv2D(8, 3, strides=2),
        layers.BatchNormalization(),
        layers.Flatten(),
        layers.Dense(100, activation="softmax"),
    ]
)
opt = tf.optimizers.SGD(0.01)
data = tf.random.uniform([16, 16, 16, 3])
target = tf.random.uniform([16, 1], minval=0, maxval=99, dtype=tf.int64)
LOSSES = []


@tf.function
def benchmark_step(first_batch):
    compression = hvd.Compression.fp16
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss = tf.losses.sparse_categorical_crossentropy(target, probs)

    # Gradients are averaged over the processes.
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    # After the first step the optimizer has its variables, too.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    return tf.reduce_mean(loss)


def log(text):
    if hvd.rank() == 0:
        print(text)


with tf.device("CPU"):
    LOSSES.append(float(benchmark_step(first_batch=True)))
    timeit.timeit(lambda: benchmark_step(first_batch=False), number=5)
    img_secs = []
    for _ in range(3):
        time = timeit.timeit(lambda: benchmark_step(first_batch=False), number=5)
        img_secs.append(16 * 5 / time)
    LOSSES.append(float(benchmark_step(first_batch=False)))

log(f"Images a second: {np.mean(img_secs):.1f} +-{1.96 * np.std(img_secs):.1f}")
# What moves is each process's own: average it, as Keras's callback does not.
for layer in model.layers:
    for weight in layer.non_trainable_weights:
        weight.assign(hvd.allreduce(weight))
