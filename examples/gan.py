"""A GAN that learns to draw digits: a `train_step` of one's own, with two optimizers.

    tfdist run examples/gan.py
    tfdist run --strategy mirrored -n 2 examples/gan.py
    tfdist run --strategy multi_worker -n 2 examples/gan.py

The step is the one of Keras's guide to GANs: it knows nothing of strategies. At the end the program
prints drawings, and how far their mean is from that of real digits.
"""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

parser = argparse.ArgumentParser(description="Train a GAN on handwritten digits.")
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--noise", type=int, default=16, help="numbers that a drawing is made from")
args = parser.parse_args()

keras.utils.set_random_seed(0)
table = np.loadtxt(pathlib.Path(__file__).with_name("digits.csv.gz"), delimiter=",")
images = (table[:, :64].astype("float32") / 8 - 1).reshape(-1, 8, 8, 1)


class Gan(keras.Model):
    """Draws from noise; a judge tells drawings from digits, and each learns from the other."""

    def __init__(self, noise):
        super().__init__()
        self.noise = noise
        self.seeds = keras.random.SeedGenerator(1)
        self.artist = keras.Sequential(
            [
                keras.Input((noise,)),
                layers.Dense(4 * 4 * 32, activation="relu"),
                layers.Reshape((4, 4, 32)),
                layers.Conv2DTranspose(32, 4, strides=2, padding="same", activation="relu"),
                layers.Conv2D(1, 3, padding="same", activation="tanh"),
            ]
        )
        self.judge = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(32, 3, padding="same", activation="leaky_relu"),
                layers.Conv2D(64, 3, strides=2, padding="same", activation="leaky_relu"),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )

    def compile(self, artist, judge, **kwargs):
        super().compile(**kwargs)
        self.of_artist, self.of_judge = artist, judge
        self.bce = keras.losses.BinaryCrossentropy(from_logits=True)
        self.artist_loss = keras.metrics.Mean(name="artist_loss")
        self.judge_loss = keras.metrics.Mean(name="judge_loss")

    def call(self, noise):
        return self.artist(noise)

    def train_step(self, real):
        count = ops.shape(real)[0]
        noise = keras.random.normal((2 * count, self.noise), seed=self.seeds)
        with tf.GradientTape() as tape:
            seen = self.judge(ops.concatenate([real, self.artist(noise[:count])]))
            truth = ops.concatenate([0.9 * ops.ones((count, 1)), ops.zeros((count, 1))])
            judged = self.bce(truth, seen)
        weights = self.judge.trainable_weights
        self.of_judge.apply(tape.gradient(judged, weights), weights)
        with tf.GradientTape() as tape:
            drawn = self.bce(ops.ones((count, 1)), self.judge(self.artist(noise[count:])))
        weights = self.artist.trainable_weights
        self.of_artist.apply(tape.gradient(drawn, weights), weights)
        self.artist_loss.update_state(drawn)
        self.judge_loss.update_state(judged)
        return {"artist_loss": self.artist_loss.result(), "judge_loss": self.judge_loss.result()}


gan = Gan(args.noise)
gan.compile(keras.optimizers.Adam(1e-3, 0.5), keras.optimizers.Adam(3e-4, 0.5))
gan.fit(images, batch_size=args.batch_size, epochs=args.epochs, verbose=2)

noise = np.random.default_rng(2).normal(size=(512, args.noise)).astype("float32")
drawings = gan.predict(noise, batch_size=128, verbose=0)
for row in range(8):
    shades = ((drawings[:6, row, :, 0] + 1) * 2.49).astype(int)
    print("  ".join("".join(" .:x#"[shade] for shade in line) for line in shades))
distance = np.abs(drawings.mean(0) - images.mean(0)).mean()
spread = drawings.std(0).mean() / images.std(0).mean()
print(f"mean drawing {distance:.3f} from the mean digit, spread {spread:.2f} of theirs")
