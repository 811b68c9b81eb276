"""tfdist: a Keras 3 model and `model.fit`, on the servers that `tfdist run` starts."""

from __future__ import annotations

import keras

from bench.data import build_model, make_dataset
from bench.job import Job
from bench.measure import Meter
from bench.tfdist_servers import make_strategy, serve

__all__ = ["serve", "train"]


def train(job: Job, meter: Meter) -> dict[str, float]:
    """Trains two epochs of `job.steps` steps and times the second one."""
    strategy = make_strategy(job)
    with strategy.scope():
        model, optimizer = build_model(job, keras)
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=job.steps_per_execution,
        )
    timing = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: meter.start() if epoch == 1 else None,
        on_epoch_end=lambda epoch, logs: meter.stop() if epoch == 1 else None,
    )
    history = model.fit(
        make_dataset(job), epochs=2, steps_per_epoch=job.steps, callbacks=[timing], verbose=0
    )
    return {
        "iterations": int(optimizer.iterations.numpy()),
        "accuracy": float(history.history["accuracy"][-1]),
    }
