"""A small transformer that learns to write the help texts of Python, letter by letter.

The text ships with Python. The same file runs on one device and in stages:

    tfdist run examples/language_model.py
    tfdist run --strategy pipeline --devices 4 --microbatches 8 examples/language_model.py
    tfdist run -s pipeline -n 2 --microbatches 8 --timeline step.png examples/language_model.py

and with parts of its weights, or of its layers, in each process:

    tfdist run --strategy multi_worker -n 2 --zero 3 examples/language_model.py
    tfdist run --strategy multi_worker -n 2 --mesh model=2 examples/language_model.py
"""

import argparse
import pydoc_data.topics

import keras
import numpy as np
from keras import layers, ops

parser = argparse.ArgumentParser(description="Train a transformer on the help texts of Python.")
parser.add_argument("--steps", type=int, default=80, help="updates")
parser.add_argument("--epochs", type=int, default=1, help="passes over the updates' sequences")
parser.add_argument("--batch-size", type=int, default=32, help="sequences of an update")
parser.add_argument("--length", type=int, default=64, help="letters of a sequence")
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--save", metavar="FILE.keras", help="where to save the trained model")
args = parser.parse_args()

keras.utils.set_random_seed(0)
text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
letters = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype("int32")
border = len(letters) * 9 // 10


def sequences(part, count, seed):
    """Pieces of the text, and the letter after each letter."""
    starts = np.random.default_rng(seed).integers(0, len(part) - args.length - 1, count)
    rows = part[starts[:, None] + np.arange(args.length + 1)]
    return rows[:, :-1], rows[:, 1:]


@keras.saving.register_keras_serializable()
class Positions(layers.Layer):
    """Adds a vector for each place."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal", name="table")

    def call(self, x):
        return x + self.table


@keras.saving.register_keras_serializable()
class Block(layers.Layer):
    """Attention to what came before, and two dense layers, each added to its input."""

    def __init__(self, width, heads=4, **kwargs):
        super().__init__(**kwargs)
        self.width, self.heads = width, heads
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.up, self.down = layers.Dense(4 * width, "gelu"), layers.Dense(width)

    def build(self, shape):
        self.attention.build(shape, shape)
        for norm in self.norms:
            norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * self.width))

    def call(self, x):
        normal = self.norms[0](x)
        x = x + self.attention(normal, normal, use_causal_mask=True)
        return x + self.down(self.up(self.norms[1](x)))

    def get_config(self):
        return {**super().get_config(), "width": self.width, "heads": self.heads}


tokens = keras.Input((args.length,), dtype="int32")
x = Positions(name="positions")(layers.Embedding(128, args.width, name="letters")(tokens))
for number in range(args.blocks):
    x = Block(args.width, name=f"block{number}")(x)
x = layers.Dense(128, name="next")(layers.LayerNormalization(name="norm")(x))
model = keras.Model(tokens, x)
model.compile(
    keras.optimizers.Adam(2e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
features, labels = sequences(letters[:border], args.steps * args.batch_size, seed=1)
model.fit(features, labels, batch_size=args.batch_size, epochs=args.epochs, shuffle=False)

held_out = sequences(letters[border:], 128, seed=2)
loss, accuracy = model.evaluate(*held_out, verbose=0)
if args.save:
    model.save(args.save)
bits = float(ops.convert_to_numpy(loss)) / np.log(2)
print(f"{bits:.2f} bits a letter on held-out text, accuracy {accuracy:.2%}")
