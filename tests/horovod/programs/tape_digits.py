"""A loop by hand, as Horovod's TensorFlow 2 example: the tape averages, rank 0 writes."""

import horovod.tensorflow as hvd
import tensorflow as tf

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
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dropout(0.2),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()

# The learning rate grows with the number of processes.
opt = tf.optimizers.Adam(0.002 * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)

    # Gradients are averaged over the processes.
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    # After the first step the optimizer has its variables, too.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    return loss_value


LOSSES = []
for batch, (images, labels) in enumerate(dataset.take(160 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    if batch % 20 == 0 and hvd.local_rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}")
    LOSSES.append(float(hvd.allreduce(loss_value)))

# Rank 0 alone writes.
if hvd.rank() == 0:
    checkpoint.save("./checkpoints")
