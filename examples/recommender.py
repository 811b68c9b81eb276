"""A recommender with large tables: which films will a visitor like?

The tables of visitors and films have 250,000 rows each, most of which no batch needs. On parameter
servers they stay there, in parts, and only the rows of a batch cross the network:

    tfdist run examples/recommender.py
    tfdist run --strategy parameter_server -n 2 --ps 2 --mode async examples/recommender.py
    tfdist run --strategy multi_worker -n 2 examples/recommender.py

The ratings are made here: visitors and films have hidden tastes, popular films are seen more often.
"""

import argparse

import keras
import numpy as np
from keras import layers, ops

parser = argparse.ArgumentParser(description="Train embeddings of visitors and films.")
parser.add_argument("--rows", type=int, default=250_000, help="rows of each table")
parser.add_argument("--visitors", type=int, default=3_000)
parser.add_argument("--films", type=int, default=1_000)
parser.add_argument("--ratings", type=int, default=300_000, help="for training")
parser.add_argument("--width", type=int, default=8, help="numbers of a row")
parser.add_argument("--batch-size", type=int, default=2048)
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
HELD_OUT = 50_000
tastes = rng.normal(size=(args.visitors, 4)), rng.normal(size=(args.films, 4))
visitor = rng.integers(0, args.visitors, args.ratings + HELD_OUT)
film = (args.films * rng.random(len(visitor)) ** 2).astype(int)
likes = (tastes[0][visitor] * tastes[1][film]).sum(1) + rng.normal(size=len(visitor)) > 0


def hashed(numbers, seed):
    """Rows of the table: as for names, of which nobody knows how many there will be."""
    mixed = (numbers.astype(np.uint64) + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(32)) % np.uint64(args.rows)).astype("int32")


inputs = {"visitor": hashed(visitor, seed=1), "film": hashed(film, seed=2)}
train = {name: rows[:-HELD_OUT] for name, rows in inputs.items()}, likes[:-HELD_OUT]
held_out = {name: rows[-HELD_OUT:] for name, rows in inputs.items()}, likes[-HELD_OUT:]

ids = {name: keras.Input((), dtype="int32", name=name) for name in inputs}
rows = {}
for name, each in ids.items():
    start = keras.initializers.RandomNormal(stddev=0.3, seed=len(name))
    rows[name] = layers.Embedding(args.rows, args.width, start, name=f"{name}s")(each)
score = ops.sum(rows["visitor"] * rows["film"], axis=-1, keepdims=True)
model = keras.Model(ids, layers.Dense(1, activation="sigmoid", name="scale")(score))
optimizer = keras.optimizers.Adagrad(0.2, initial_accumulator_value=1e-9)
model.compile(optimizer, "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
model.fit(*train, batch_size=args.batch_size, epochs=args.epochs, verbose=2)
loss, auc = model.evaluate(*held_out, batch_size=4096, verbose=0)
print(f"{model.count_params():,} weights, AUC on held-out ratings {auc:.3f}")
