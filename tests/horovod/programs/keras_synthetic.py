"""Images per second with Keras, as Horovod's benchmark: random images, halved gradients."""

import argparse
from timeit import default_timer as timer

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

parser = argparse.ArgumentParser(description="Benchmark")
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--num-batches-per-iter", type=int, default=4)
parser.add_argument("--num-iters", type=int, default=4)
args = parser.parse_args()

# Start Horovod.
hvd.init()
if hvd.rank() == 0:
    print(f"Batch size: {args.batch_size}")
    print(f"Number of CPUs: {hvd.size()}")

model = tf.keras.Sequential(
    [
        tf.keras.Input((16, 16, 3)),
        layers.Conv2D(8, 3, strides=2),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(100, activation="softmax"),
    ]
)
opt = tf.optimizers.SGD(0.01)

data = tf.random.uniform([args.batch_size, 16, 16, 3])
target = tf.random.uniform([args.batch_size, 1], minval=0, maxval=99, dtype=tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((data, target))
dataset = dataset.cache().repeat().batch(args.batch_size)

compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
opt = hvd.DistributedOptimizer(opt, compression=compression)
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    experimental_run_tf_function=False,
)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]


class TimingCallback(tf.keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.img_secs = []

    def on_train_end(self, logs=None):
        mean = np.mean(self.img_secs)
        print(f"Images a second: {mean:.1f} of {hvd.size() * mean:.1f}")

    def on_epoch_begin(self, epoch, logs=None):
        self.starttime = timer()

    def on_epoch_end(self, epoch, logs=None):
        if epoch > 0:  # The first one traces.
            count = args.batch_size * args.num_batches_per_iter
            self.img_secs.append(count / (timer() - self.starttime))


if hvd.rank() == 0:
    callbacks.append(TimingCallback())

history = model.fit(
    dataset,
    steps_per_epoch=args.num_batches_per_iter,
    callbacks=callbacks,
    epochs=args.num_iters,
    verbose=0,
)
LOSSES = history.history["loss"]
