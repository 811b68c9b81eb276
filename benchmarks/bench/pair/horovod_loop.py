"""A training loop as Horovod's documentation has it, with a Keras 3 model.

https://horovod.readthedocs.io/en/stable/tensorflow.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from bench.pair.data import batches
from bench.pair.job import BATCH, Pair, Workload
from bench.pair.keras_models import LOSS, build, judge

__all__ = ["start"]


def start(job: Pair) -> Any:
    """Initialises Horovod."""
    hvd.init()
    return _Process(job.processes)


class _Process:
    def __init__(self, processes: int) -> None:
        self.rank, self._processes = hvd.rank(), processes

    def exchange(self, count: int) -> Callable[[], Any]:
        """An all-reduce in a function."""
        values = tf.Variable(tf.zeros(count))
        return tf.function(lambda: hvd.allreduce(values, op=hvd.Sum, name=f"of.{count}"))

    def train(self, workload: Workload, blocks: int, clock: Any) -> float:
        model, optimizer = build(workload)
        # Horovod's tape asks TensorFlow's variables for what Keras 3's do not have.
        variables = [variable.value for variable in model.trainable_variables]

        @tf.function
        def step(features: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = LOSS(labels, model(features, training=True))
            tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, variables)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        optimizer.build(model.trainable_variables)
        hvd.broadcast_variables(variables, root_rank=0)
        hvd.broadcast_variables([each.value for each in optimizer.variables], root_rank=0)
        data = tf.data.Dataset.from_tensor_slices(batches(workload, self.rank, self._processes))
        data = data.repeat().batch(BATCH // self._processes, drop_remainder=True).prefetch(2)
        numbers = iter(data)
        for _ in range(blocks):
            clock.start()
            for _ in range(workload.steps):
                step(*next(numbers))
            clock.stop()
        return judge(workload, model.get_weights())

    def close(self) -> None:
        hvd.shutdown()
