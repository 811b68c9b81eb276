"""Training loops that never call `Strategy.run`: each worker computes the whole batch.

A loop written for one device takes its gradients outside of any replica. TensorFlow's tape then
watched the component of a mirrored variable that was read, and does not know the variable itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._keras import Trainer
from tfdist._tf.distribute import is_distributed, local_results
from tfdist.keras.hooks import Hook
from tfdist.types import Logs, Model, Structure


def hooks() -> list[Hook]:
    """The seams at which single-device code meets variables that are held once a replica."""
    return [
        Hook(tf.GradientTape, "gradient", _of_components),
        Hook(tf.GradientTape, "jacobian", _of_components),
        Hook(tf.GradientTape, "watch", _watch_component),
        Hook(Trainer, "get_metrics_result", _as_tensors),
    ]


def _component(source: Structure) -> Structure:
    """The one value of this process, for a variable that was read outside of a replica."""
    value = getattr(source, "value", source)
    variable = source if callable(value) else value
    if not is_distributed(variable):
        return source
    return local_results(tf.distribute.get_strategy(), variable)[0]


def _of_components(original: Callable[..., Any]) -> Callable[..., Any]:
    """A tape knows a replica's own variable, not the one that a loop asks for."""

    @functools.wraps(original)
    def gradient(
        self: object, target: Structure, sources: Structure, *args: object, **kwargs: object
    ) -> Structure:
        if tf.distribute.in_cross_replica_context():
            sources = tf.nest.map_structure(_component, sources)
        return original(self, target, sources, *args, **kwargs)

    return gradient


def _watch_component(original: Callable[..., Any]) -> Callable[..., Any]:
    """A tape knows a replica's own variable, not the one that a loop asks for."""

    @functools.wraps(original)
    def watch(self: object, tensor: Structure) -> object:
        if tf.distribute.in_cross_replica_context():
            tensor = tf.nest.map_structure(_component, tensor)
        return original(self, tensor)

    return watch


def _as_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Reads metrics whose `result` is a variable, which has one value for each replica."""

    @functools.wraps(original)
    def get_metrics_result(self: Model) -> Logs:
        results = original(self)
        return {
            name: tf.convert_to_tensor(value) if is_distributed(value) else value
            for name, value in results.items()
        }

    return get_metrics_result
