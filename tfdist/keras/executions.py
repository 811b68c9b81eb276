"""`steps_per_execution` on several replicas: the steps are called one after the other.

Keras runs them in one graph loop around the iterator, which TensorFlow cannot execute on a
distributed iterator (`You must feed a value for placeholder tensor 'while/cond/Placeholder'`, with
stock MirroredStrategy too; keras#19246). Callbacks, logs and numbers are as with the loop.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist._keras import TensorFlowTrainer
from tfdist.comm import host_collectives
from tfdist.keras.hooks import Hook
from tfdist.types import Model


def hooks() -> list[Hook]:
    """The seam at which Keras makes the function of an execution."""
    return [Hook(TensorFlowTrainer, "_make_function", _step_by_step)]


def _step_by_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras unrolls the steps of a call, of which the last may have no batch on some workers."""

    @functools.wraps(original)
    def make_function(self: Model, step_function: Callable[..., Any]) -> Callable[..., Any]:
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync == 1 and host_collectives.worker_count(strategy) == 1:
            return original(self, step_function)
        function = original(self, step_function)

        def execute(iterator: Iterator[Any]) -> object:
            if not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
                return function(iterator)
            outputs = None
            for step in range(self.steps_per_execution):
                try:
                    with _one_step_at_a_time(self):
                        outputs = function(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    if step == 0:
                        raise
                    break
            return outputs

        return execute

    return make_function


@contextlib.contextmanager
def _one_step_at_a_time(model: Model) -> Iterator[None]:
    steps = model.steps_per_execution
    model.steps_per_execution = 1
    try:
        yield
    finally:
        model.steps_per_execution = steps
