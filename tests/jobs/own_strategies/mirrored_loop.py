"""A loop by hand on a MirroredStrategy of the program's own, with distributed data sets."""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(7)
x = np.random.rand(150, 8, 8, 1).astype("float32")
y = (x.mean(axis=(1, 2, 3)) * 1000).astype("int64") % 4

strategy = tf.distribute.MirroredStrategy()
GLOBAL_BATCH_SIZE = int(sys.argv[1]) * strategy.num_replicas_in_sync
EPOCHS = 2

train_dataset = (
    tf.data.Dataset.from_tensor_slices((x[:128], y[:128])).shuffle(128, 3).batch(GLOBAL_BATCH_SIZE)
)
test_dataset = tf.data.Dataset.from_tensor_slices((x[128:], y[128:])).batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model():
    regularizer = keras.regularizers.L2(1e-5)
    return keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, activation="relu", kernel_regularizer=regularizer),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu", kernel_regularizer=regularizer),
            keras.layers.Dense(4, kernel_regularizer=regularizer),
        ]
    )


with strategy.scope():
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss

    test_loss = keras.metrics.Mean(name="test_loss")
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    model = create_model()
    model.build((None, 8, 8, 1))
    optimizer = keras.optimizers.Adam(learning_rate=0.01)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    test_loss.update_state(loss_object(labels, predictions))
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


results = []
for _ in range(EPOCHS):
    total_loss, num_batches = 0.0, 0
    for batch in train_dist_dataset:
        total_loss += distributed_train_step(batch)
        num_batches += 1
    for batch in test_dist_dataset:
        distributed_test_step(batch)
    results += [float(total_loss) / num_batches, float(train_accuracy.result())]
    results += [float(test_loss.result()), float(test_accuracy.result())]
    for metric in (test_loss, train_accuracy, test_accuracy):
        metric.reset_state()
checkpoint.save(os.path.join("training_checkpoints", "ckpt"))

# Iterating by hand, and whole epochs inside a function.
iterator = iter(train_dist_dataset)
for _ in range(2):
    results.append(float(distributed_train_step(next(iterator))))


@tf.function
def distributed_train_epoch(dataset):
    total, steps = 0.0, 0
    for batch in dataset:
        per_replica_losses = strategy.run(train_step, args=(batch,))
        total += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
        steps += 1
    return total / tf.cast(steps, tf.float32)


results.append(float(distributed_train_epoch(train_dist_dataset)))

restored = create_model()
restored.build((None, 8, 8, 1))
tf.train.Checkpoint(model=restored).restore(
    tf.train.latest_checkpoint("training_checkpoints")
).expect_partial()
results.append(float(np.sum([np.abs(w).sum() for w in restored.get_weights()])))
print("RESULT", json.dumps(results))
