"""Private TensorFlow symbols around graphs that sessions run, checked on TensorFlow 2.21."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.training import training_util

__all__ = ["graph_scope", "listen_to", "on_replicas", "read_step_alone", "session_config_for"]


def listen_to(hook: Any, listeners: Sequence[Any]) -> None:
    """Adds listeners to a `tf.compat.v1.train.CheckpointSaverHook` that somebody else has made."""
    hook._listeners = [*hook._listeners, *listeners]


def session_config_for(strategy: Any, config: Any) -> Any:
    """A session's configuration with what a strategy's collectives need."""
    return strategy.extended._update_config_proto(config) or config


def on_replicas(
    strategy: Any, function: Callable[..., Any], values: Sequence[tuple[Any, ...]]
) -> Any:
    """Builds a function on each replica of this process, in the default graph.

    The losses of `tf.compat.v1.train` optimizers are scaled so that the replicas' gradients, which
    are summed, come to their mean.

    Args:
        strategy: the strategy, whose scope is open.
        function: what each replica builds.
        values: for each replica its arguments.

    Returns:
        What the function returns, as per-replica values.
    """
    arguments = [
        distribute_utils.regroup(tuple(each), always_wrap=True)
        for each in zip(*values, strict=True)
    ]
    with strategy._scale_loss_for_estimator_enabled():
        return strategy.extended.call_for_each_replica(function, args=tuple(arguments))


def read_step_alone(strategy: Any, step: Any) -> None:
    """Lets TensorFlow's hooks read a replicated global step without the other workers.

    The read that they make by themselves has the variable's initial value in its graph, and with it
    the broadcast of that: a hook that only the chief has would wait for the others for ever.
    """
    own = strategy.experimental_local_results(step)[0]
    tf.compat.v1.add_to_collection(training_util.GLOBAL_STEP_READ_KEY, own.read_value() + 0)


@contextlib.contextmanager
def graph_scope(strategy: Any) -> Iterator[None]:
    """TensorFlow's own scope of a strategy, in which Keras is not hooked."""
    with tf.distribute.Strategy.scope(strategy):
        yield
