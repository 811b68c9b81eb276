"""Training in pieces: each run goes on where the one before it was ended.

On clusters where jobs are ended early, by a time limit or by jobs that matter more:

    tfdist run --strategy multi_worker -n 2 --max-restarts 3 examples/resumable.py
    sbatch --array=1-4%1 --time=10 cluster/slurm_array.sbatch examples/resumable.py

`BackupAndRestore` writes what training needs every 20 updates, in the middle of an epoch too. A run
that finds a backup takes it up, and the last one removes it. `--lose-power-at 50` ends the program
after so many updates of this run, without a word, to see that it does.
"""

import argparse
import os
import pathlib

import keras
import numpy as np

parser = argparse.ArgumentParser(description="Classify digits, in as many runs as it takes.")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--backup", default="resumable-backup", help="directory; on all machines one")
parser.add_argument("--lose-power-at", type=int, metavar="UPDATES")
args = parser.parse_args()

keras.utils.set_random_seed(0)
digits = np.loadtxt(pathlib.Path(__file__).with_name("digits.csv.gz"), delimiter=",")
images, labels = digits[:, :64].astype("float32") / 16, digits[:, 64].astype("int32")


class PowerCut(keras.callbacks.Callback):
    """Ends the program after some updates, as a machine that goes off would."""

    def __init__(self, updates):
        super().__init__()
        self.left = updates

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            os._exit(75)


model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
callbacks = [keras.callbacks.BackupAndRestore(args.backup, save_freq=20)]
if args.lose_power_at:
    callbacks.append(PowerCut(args.lose_power_at))
model.fit(
    images[:1408], labels[:1408], batch_size=64, epochs=args.epochs, callbacks=callbacks, verbose=2
)
_, accuracy = model.evaluate(images[1408:], labels[1408:], verbose=0)
updates = int(model.optimizer.iterations.numpy())
print(f"accuracy on unseen digits {accuracy:.2%} after {updates} updates")
