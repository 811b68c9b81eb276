"""Keras, as Horovod's ImageNet example: schedules, checkpoints of rank 0, and where they end."""

import argparse
import os

import horovod.keras as hvd
import keras

from tests.cases.digits import load_digits

parser = argparse.ArgumentParser(description="Digits")
parser.add_argument("--log-dir", default="./logs")
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.h5")
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.05)
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005)
args = parser.parse_args()

# Start Horovod.
hvd.init()

# Where a former run has ended: rank 0 has its checkpoints.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch")
verbose = 2 if hvd.rank() == 0 else 0

digits = load_digits()
x = (digits.images[..., None] / 16.0).astype("float32")
y = keras.utils.to_categorical(digits.target, 10)
share = slice(hvd.rank(), None, hvd.size())
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
initial_lr = args.base_lr * hvd.size()

# Rank 0 goes on where it was; the others get its weights and its optimizer's state.
if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(
        args.checkpoint_format.format(epoch=resume_from_epoch), compression=compression
    )
else:
    decay = keras.regularizers.L2(args.wd)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, kernel_regularizer=decay),
            keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax", kernel_regularizer=decay),
        ]
    )
    opt = keras.optimizers.SGD(learning_rate=initial_lr, momentum=args.momentum)
    opt = hvd.DistributedOptimizer(opt, compression=compression)
    model.compile(
        loss=keras.losses.CategoricalCrossentropy(),
        optimizer=opt,
        metrics=["accuracy", "top_k_categorical_accuracy"],
    )

warmup, schedule = (
    hvd.callbacks.LearningRateWarmupCallback,
    hvd.callbacks.LearningRateScheduleCallback,
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    warmup(warmup_epochs=args.warmup_epochs, initial_lr=initial_lr, verbose=verbose),
    schedule(start_epoch=1, end_epoch=3, multiplier=1.0, initial_lr=initial_lr),
    schedule(start_epoch=3, multiplier=1e-1, initial_lr=initial_lr),
]

# Rank 0 alone writes.
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format))
    callbacks.append(keras.callbacks.TensorBoard(args.log_dir))

history = model.fit(
    x[share],
    y[share],
    batch_size=args.batch_size,
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=verbose,
    initial_epoch=resume_from_epoch,
    validation_data=(x[share], y[share]),
)

score = hvd.allreduce(model.evaluate(x[share], y[share], verbose=0))
if verbose:
    print("Test loss:", float(score[0]))
    print("Test accuracy:", float(score[1]))
LOSSES = history.history["val_loss"]
