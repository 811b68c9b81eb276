"""One process of the comparison: `python task.py JOB OUT`, or the server of the second stage."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.lines import Line

__all__ = ["Job", "Result", "main"]


#: Where models are cut; the others have a layer of that name.
_CUTS = {"resnet50": "conv4_block1_1_conv"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Line):
    """One start.

    Attributes:
        model: `"mlp"`, `"transformer"` or `"resnet50"`.
        ports: of chief and worker; none for the whole model on one core.
        shapes: schedule and microbatches of each pipeline, one after the other.
        steps: timed steps of each.
        role: `"chief"` or `"worker"`.
    """

    model: str
    ports: tuple[int, ...] = ()
    shapes: tuple[tuple[str, int], ...] = ()
    steps: int = 6
    role: str = "chief"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What one way to train has measured.

    Attributes:
        name: schedule and microbatches, or `"whole"`.
        seconds: of a step, the median.
        bubble: idle share of the two devices.
        ideal: the schedule's own.
        forward: seconds of a stage's forward steps of a batch, the mean of both stages.
        backward: those of its backward steps.
    """

    name: str
    seconds: float
    bubble: float = 0.0
    ideal: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


def main(job: Job, out: Path) -> None:
    """Trains and writes what was measured."""
    import tensorflow as tf

    os.sched_setaffinity(0, {1 if job.role == "worker" else 0})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if job.role == "worker":
        _serve(job, tf)
        return
    if not job.ports:
        found = [_whole(job)]
    else:
        tf.config.experimental_connect_to_cluster(_cluster(job, tf), "chief", 0)
        found = [_piped(job, schedule, count) for schedule, count in job.shapes]
    out.write_text(json.dumps([dataclasses.asdict(each) for each in found]))


def _cluster(job: Job, tf: Any) -> Any:
    chief, worker = (f"127.0.0.1:{port}" for port in job.ports)
    return tf.train.ClusterSpec({"chief": [chief], "worker": [worker]})


def _serve(job: Job, tf: Any) -> None:
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=4, intra_op_parallelism_threads=1
    )
    server = tf.distribute.Server(
        _cluster(job, tf), job_name="worker", task_index=0, config=config, protocol="grpc"
    )
    sys.stdin.read()  # Until the parent ends.
    del server


def _whole(job: Job) -> Result:
    return Result(name="whole", seconds=_median_step(*_model(job.model), job.steps))


def _piped(job: Job, schedule: str, count: int) -> Result:
    from tfdist.strategies.pipeline.schedules import Kind, bubble, ideal_bubble
    from tfdist.strategies.pipeline.strategy import Pipeline

    tasks = ["/job:chief/task:0", "/job:worker/task:0"]
    strategy = Pipeline(
        tasks, microbatches=count, schedule=schedule, cuts=[_CUTS.get(job.model, "middle")]
    )
    with strategy.scope():
        made = _model(job.model)
    model = made[0]
    seconds = _median_step(*made, job.steps)
    boxes = model.train_function.engine.last_batch()
    spent = {
        kind: sum(box.end - box.begin for box in boxes if box.step.kind is kind) / 2
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    return Result(
        name=f"{schedule}, m = {count}",
        seconds=seconds,
        bubble=bubble(boxes),
        ideal=ideal_bubble(schedule, 2, count),
        forward=spent[Kind.FORWARD],
        backward=spent[Kind.BACKWARD],
    )


def _median_step(model: Any, x: Any, y: Any, loss: str, steps: int) -> float:
    import keras

    model.compile(keras.optimizers.SGD(1e-3), loss, jit_compile=False)
    times: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.begun = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(time.perf_counter() - self.begun)

    size = len(x) // 3
    for _ in range(1 + steps // 3):
        model.fit(x, y, size, 1, verbose=0, shuffle=False, callbacks=[Clock()])
    return statistics.median(times[3:])


def _model(name: str) -> tuple[Any, Any, Any, str]:
    """A model of two halves that take about as long, three batches with labels, and the loss."""
    import keras
    import numpy as np
    from keras import layers

    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    if name == "mlp":
        names = ["one", "two", "three", "middle", "five", "six"]
        rows = [layers.Dense(2048, "relu", name=each) for each in names]
        x = numbers.normal(size=(3 * 512, 2048)).astype("float32")
        return keras.Sequential([keras.Input((2048,)), *rows]), x, x, "mse"
    if name == "resnet50":
        model = keras.applications.ResNet50(weights=None, input_shape=(128, 128, 3), classes=100)
        x = numbers.normal(size=(3 * 32, 128, 128, 3)).astype("float32")
        return model, x, numbers.integers(0, 100, 3 * 32), "sparse_categorical_crossentropy"
    inputs = x = keras.Input((128, 256))
    for number in range(8):
        first = layers.LayerNormalization(name="middle" if number == 4 else f"first{number}")(x)
        x = x + layers.MultiHeadAttention(4, 64)(first, first)
        second = layers.LayerNormalization()(x)
        x = x + layers.Dense(256)(layers.Dense(1024, "relu")(second))
    data = numbers.normal(size=(3 * 32, 128, 256)).astype("float32")
    return keras.Model(inputs, x), data, data, "mse"


if __name__ == "__main__":
    main(Job.from_json(sys.argv[1]), Path(sys.argv[2]))
