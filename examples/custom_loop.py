"""A training loop written for tf.distribute: the same file for every strategy.

    python examples/custom_loop.py --strategy mirrored --devices 2
    tfdist run --strategy multi_worker -n 2 examples/custom_loop.py

The loop scales its loss by the global batch and the gradients of the replicas are summed, as
`tf.distribute` documents it.
"""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf

import tfdist

parser = argparse.ArgumentParser(description="Classify digits in a hand-written training loop.")
parser.add_argument("--strategy", help="single, mirrored, multi_worker (default: the active one)")
parser.add_argument("--devices", type=int, help="replicas in this process")
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args()

strategy = tfdist.strategy(args.strategy, devices=args.devices)
keras.utils.set_random_seed(0)
BATCH = 64

digits = np.loadtxt(pathlib.Path(__file__).with_name("digits.csv.gz"), delimiter=",")
images, labels = digits[:, :64].astype("float32") / 16, digits[:, 64].astype("int32")
data = tf.data.Dataset.from_tensor_slices((images[:1408], labels[:1408]))
data = strategy.experimental_distribute_dataset(
    data.shuffle(1408, seed=1).batch(BATCH, drop_remainder=True)
)

with strategy.scope():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def replica_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.nn.compute_average_loss(loss_of(y, model(x)), global_batch_size=BATCH)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def train_step(x, y):
    return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)


for epoch in range(args.epochs):
    losses = [float(train_step(x, y)) for x, y in data]
    print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}")

predicted = tf.argmax(model(images[1408:]), axis=1).numpy()
print(f"accuracy on unseen digits {(predicted == labels[1408:]).mean():.2%}")
