"""Pipelines without a flush between batches, and the simulation that they are compared with."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases.pipeline_cases import compiled, data, dense, pipeline
from tests.cases.placement_cases import apart
from tfdist.strategies.pipeline.schedules import version


class Delayed:
    """One process that trains as an asynchronous schedule says: gradients on old weights.

    Args:
        model: the model, in chunks of layers.
        groups: for each stage its layers.
        schedule: the schedule.
        microbatches: parts of a batch.
        vertical: whether all stages use the first one's version.
    """

    def __init__(
        self, model: Any, groups: Any, schedule: str, microbatches: int, vertical: bool
    ) -> None:
        self.model, self.schedule, self.vertical = model, schedule, vertical
        self.groups = [[w for layer in g for w in layer.trainable_weights] for g in groups]
        self.microbatches = microbatches
        self.rate = 0.05
        self.restart()

    def restart(self) -> None:
        """The pipeline has been drained: all stages go on from the newest weights."""
        self.versions = [[[w.numpy() for w in group]] for group in self.groups]
        self.batch = 0

    def train(self, x: Any, y: Any) -> float:
        stages = len(self.groups)
        newest = [list(group[-1]) for group in self.versions]
        for stage, group in enumerate(self.groups):
            number = version(self.schedule, stages, stage, self.batch, vertical_sync=self.vertical)
            for w, value in zip(group, self.versions[stage][number], strict=True):
                w.assign(value)
        with tf.GradientTape() as tape:
            out = self.model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)
            loss = tf.reduce_mean(losses) + sum(self.model.losses)
        grads = tape.gradient(loss, self.groups)
        for stage, (values, own) in enumerate(zip(newest, grads, strict=True)):
            following = [v - self.rate * np.asarray(g) for v, g in zip(values, own, strict=True)]
            self.versions[stage].append(following)
        self.batch += 1
        return float(loss)

    def flush(self) -> None:
        for group, values in zip(self.groups, self.versions, strict=True):
            for w, value in zip(group, values[-1], strict=True):
                w.assign(value)
        self.restart()


def equals_delayed(
    strategy: Any,
    schedule: str,
    stages: int,
    microbatches: int,
    vertical_sync: bool = False,
    directory: str = "",
) -> dict[str, Any]:
    """Three epochs, each with a flush at its end, beside the simulation of the delays.

    With a directory, checkpoints are written in the middle of epochs too, which flush first.
    """
    x, y, _ = data("dense", 96)
    simulated = dense()
    start = simulated.get_weights()
    borders = {2: [3], 3: [2, 4], 4: [2, 4, 5]}[stages]
    rows = list(simulated.layers)
    groups = [rows[a:b] for a, b in zip([0, *borders], [*borders, len(rows)], strict=True)]
    by_hand = Delayed(simulated, groups, schedule, microbatches, vertical_sync)
    checkpoints = {4: "{epoch}-{batch}.keras", 7: "{epoch}-{batch}.weights.h5"}
    losses, files = [], {}
    for epoch in range(1, 4):
        found = []
        for batch in range(1, 7):
            rows_of = slice(16 * batch - 16, 16 * batch)
            found.append(by_hand.train(x[rows_of], y[rows_of]))
            for frequency, name in checkpoints.items() if directory else ():
                if (6 * epoch - 6 + batch) % frequency == 0:
                    by_hand.flush()
                    files[name.format(epoch=epoch, batch=batch)] = simulated.get_weights()
        losses.append(np.mean(found))
        by_hand.flush()
    made = pipeline(
        stages,
        schedule=schedule,
        microbatches=microbatches,
        vertical_sync=vertical_sync,
        cuts=[f"dense{border}" for border in borders],
    )
    with made.scope():
        model = compiled(dense(), "plain")
    model.set_weights(start)
    looked: list[float] = []
    seen = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: looked.append(float(model.layers[0].kernel.numpy().sum()))
    )
    savers = [
        keras.callbacks.ModelCheckpoint(
            f"{directory}/{name}", save_freq=frequency, save_weights_only="weights" in name
        )
        for frequency, name in checkpoints.items()
        if directory
    ]
    fit = model.fit(x, y, 16, 3, verbose=0, shuffle=False, callbacks=[seen, *savers])
    plain = compiled(dense(), "plain")
    plain.set_weights(start)
    plain.fit(x, y, 16, 3, verbose=0, shuffle=False)
    return {
        "weights": apart(simulated.get_weights(), model.get_weights()),
        "losses": [losses, fit.history["loss"]],
        "from_sync": apart(plain.get_weights(), model.get_weights()),
        "updates": int(model.optimizer.iterations),
        "looked": looked,
        "live": [worker.live for worker in model.train_function.engine.workers[0]],
        "files": {
            name: apart(expected, _weights_in(f"{directory}/{name}"))
            for name, expected in files.items()
        },
    }


def _weights_in(path: str) -> list[Any]:
    """The weights that a file of the dense model has."""
    if path.endswith(".keras"):
        return keras.models.load_model(path).get_weights()
    model = dense()
    model.load_weights(path)
    return model.get_weights()
