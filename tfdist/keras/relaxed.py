"""Functions whose traces do not depend on how many examples this process got.

TensorFlow numbers the collectives of a function when it traces it. Where a batch of 47 examples
leaves 24 rows on worker 0, a size it has seen, and 23 on worker 1, only worker 1 traces again: the
numbers drift apart, and the next collective waits for a peer that never comes (tensorflow#37112).
Functions that Keras calls with eager batches are therefore traced with an open batch dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._tensorflow import local_results, regroup


class Relaxed:
    """Calls `fn` with a batch, per replica, in a function with open leading dimensions.

    Args:
        fn: takes one structure of per-replica values and returns tensors.
        strategy: the strategy whose replicas the values are for.
    """

    def __init__(self, fn: Callable[[Any], Any], strategy: Any) -> None:
        self._fn = fn
        self._strategy = strategy
        self._traced: dict[Any, Callable[..., Any]] = {}

    def __call__(self, batch: Any) -> Any:
        """Runs `fn` on `batch`."""
        count = len(self._strategy.extended.worker_devices)
        parts = [self._on_replica(batch, i) for i in range(count)]
        flat = [self._tensors(part) for part in parts]
        specs = [[_open(t) for t in tensors] for tensors in flat]
        key = (repr(tf.nest.map_structure(_kind, parts[0])), repr(specs))
        if key not in self._traced:
            self._traced[key] = self._trace(parts[0], specs)
        return self._traced[key](flat)

    def _on_replica(self, batch: Any, replica: int) -> Any:
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else local_results(self._strategy, leaf)[replica],
            batch,
        )

    def _tensors(self, part: Any) -> list[Any]:
        leaves = tf.nest.flatten(part, expand_composites=True)
        return [tf.convert_to_tensor(leaf) for leaf in leaves if leaf is not None]

    def _trace(self, like: Any, specs: list[list[tf.TensorSpec]]) -> Callable[..., Any]:
        def restore(tensors: list[Any]) -> Any:
            supply = iter(tensors)
            leaves = tf.nest.flatten(like, expand_composites=True)
            filled = [None if leaf is None else next(supply) for leaf in leaves]
            return tf.nest.pack_sequence_as(like, filled, expand_composites=True)

        def on_tensors(flat: list[list[Any]]) -> Any:
            parts = [restore(tensors) for tensors in flat]
            return self._fn(parts[0] if len(parts) == 1 else regroup(parts))

        compiled: Callable[..., Any] = tf.function(
            on_tensors, input_signature=[specs], autograph=False
        )
        return compiled


def _open(tensor: Any) -> tf.TensorSpec:
    shape = tensor.shape
    return tf.TensorSpec([None, *shape[1:]] if shape.rank else shape, tensor.dtype)


def _kind(leaf: Any) -> str:
    return type(leaf).__name__
