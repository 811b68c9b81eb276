"""Building a model under a strategy: in its first step, as on one device.

Under a strategy Keras 3 builds a model from symbolic inputs before the first step, and makes those
inputs by adding up the replicas' batches. Unequal batches, string features and models whose `call`
is not usable stop there, and the data set is started once more than on one device. tfdist leaves
the build to the first step, and takes the creation of variables out of the replica's function: they
are created eagerly, in the strategy's scope, by the first replica that needs them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.trainers.trainer import Trainer

from tfdist._tensorflow import outside_of_function
from tfdist.keras.hooks import Hook


def hooks() -> list[Hook]:
    """The seams of Keras's symbolic build and of its variables' creation."""
    return [
        Hook(TensorFlowTrainer, "_maybe_symbolic_build", _left_to_first_step),
        Hook(Variable, "_initialize", _outside_of_replica),
        Hook(Trainer, "compile", _without_xla),
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
        if tf.is_tensor(value):  # of the function's graph, such as the zeros of an RNN's state
            value = _constant(value)
        with outside_of_function(tf.distribute.get_strategy()):
            return original(self, value)

    return initialize


def _constant(value: Any) -> Any:
    """The value of a tensor of a graph where it does not depend on the batch, else the tensor."""
    static = tf.get_static_value(value)
    return value if static is None else static


def _without_xla(original: Callable[..., None]) -> Callable[..., None]:
    """Leaves XLA off where replicas exchange gradients, and says so (keras#18716)."""

    @functools.wraps(original)
    def compile_model(self: Any, *args: Any, **kwargs: Any) -> None:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if kwargs.get("jit_compile") is True and replicas > 1:
            warnings.warn(
                f"jit_compile=True does not go with {replicas} replicas: XLA cannot compile the "
                "exchange of their gradients. The model is compiled with jit_compile=False.",
                stacklevel=3,
            )
            kwargs["jit_compile"] = False
        original(self, *args, **kwargs)

    return compile_model
