"""Building a model under a strategy: in its first step, as on one device.

Under a strategy Keras 3 builds a model from symbolic inputs before the first step, and makes those
inputs by adding up the replicas' batches. Unequal batches, string features and models whose `call`
is not usable stop there, and the data set is started once more than on one device. tfdist leaves the
build to the first step, and takes the creation of variables out of the replica's function: they are
created eagerly, in the strategy's scope, by the first replica that needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfdist._tensorflow import outside_of_function
from tfdist.keras.hooks import Hook


def hooks() -> list[Hook]:
    """The seams of Keras's symbolic build and of its variables' creation."""
    return [
        Hook(TensorFlowTrainer, "_maybe_symbolic_build", _left_to_first_step),
        Hook(Variable, "_initialize", _outside_of_replica),
    ]


def _left_to_first_step(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        del self, iterator, data_batch

    return maybe_symbolic_build


def _outside_of_replica(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize(self: Any, value: Any) -> None:
        if tf.executing_eagerly() or tf.distribute.in_cross_replica_context():
            return original(self, value)
        with outside_of_function(tf.distribute.get_strategy()):
            return original(self, value)

    return initialize
