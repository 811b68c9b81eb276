"""A chunk of a model as functions without side effects: forward, and forward once more."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import operation_fn

from tfdist.pipelines.cutting import Chunk
from tfdist.placement.devices import moved, on

__all__ = ["Part", "Values"]

#: What Keras calls the state of random numbers.
_SEED = "seed_generator_state"


@dataclasses.dataclass(frozen=True)
class Values:
    """Tensors between chunks, and Keras's masks of them.

    Attributes:
        tensors: of shape `(microbatch, ...)`, in the order of the chunk's reads or writes.
        masks: for each its mask, or None.
    """

    tensors: list[Any]
    masks: list[Any]


class Part:
    """A chunk on a device.

    Args:
        number: which chunk it is.
        chunk: the layers.
        device: the full name of the device that it runs on.
        copies: the part that has the weights, where this one is of another replica of the pipeline.

    Attributes:
        weights: Keras's trainable variables.
        state: its other variables: moving statistics, states of random numbers.
    """

    def __init__(self, number: int, chunk: Chunk, device: str, copies: Part | None = None) -> None:
        self.number, self.chunk, self.device = number, chunk, device
        variables = [v for layer in chunk.layers for v in layer.variables]
        unique = list({id(v): v for v in variables}.values())
        trainable = {id(v) for layer in chunk.layers for v in layer.trainable_weights}
        self.weights = [v for v in unique if id(v) in trainable]
        self.state = [v for v in unique if id(v) not in trainable]
        self._is_copy = copies is not None
        for variable in unique if copies is None else ():
            moved(variable, device)
        self._readers = {
            "weights": tf.function(lambda: _values(self.weights), autograph=False),
            "state": tf.function(lambda: _values(self.state), autograph=False),
        }
        self._function = tf.function(self._run, autograph=False, reduce_retracing=True)

    def read(self, which: str) -> list[Any]:
        """The present values of variables, which stay as they are when the variables change.

        Args:
            which: `"weights"` or `"state"`.
        """
        with on(self.device):
            values = list(self._readers[which]())
            return [tf.identity(value) for value in values] if self._is_copy else values

    @property
    def weight_bytes(self) -> int:
        """Bytes of all its variables."""
        values = [variable._value for variable in (*self.weights, *self.state)]
        return sum(int(v.shape.num_elements()) * int(v.dtype.size) for v in values)

    def forward(
        self, weights: Sequence[Any], state: Sequence[Any], values: Values, microbatch: Any
    ) -> tuple[Values, list[Any], Any]:
        """Runs the chunk on its device.

        Args:
            weights: values for `self.weights`.
            state: values for `self.state`.
            values: what the chunk reads.
            microbatch: its number, an int64 scalar: random layers draw other numbers for each.

        Returns:
            What it writes; the new values of the state; and the sum of the losses that its layers
            add, with those of regularizers.
        """
        tensors, masks, following, loss = self._function(
            list(weights), list(state), values.tensors, values.masks, microbatch
        )
        return Values(tensors, masks), following, loss

    def _run(self, weights: Any, state: Any, tensors: Any, masks: Any, microbatch: Any) -> Any:
        drawn = [
            _for_microbatch(v, value, microbatch)
            for v, value in zip(self.state, state, strict=True)
        ]
        pairs = [*zip(self.weights, weights, strict=True), *zip(self.state, drawn, strict=True)]
        known = dict(zip(self.chunk.reads, _masked(tensors, masks), strict=True))
        with keras.StatelessScope(state_mapping=pairs, collect_losses=True) as scope:
            written = self._through(known)
            loss = self._losses(scope)
            following = [scope.get_current_value(v) for v in self.state]
        outputs = [written[key] for key in self.chunk.writes]
        following = [
            new if value is not None and new is not before else value
            for new, before, value in zip(following, drawn, state, strict=True)
        ]
        return outputs, [getattr(each, "_keras_mask", None) for each in outputs], following, loss

    def _through(self, known: dict[Any, Any]) -> dict[Any, Any]:
        for call in self.chunk.calls:
            given = {
                id(symbol): known[key]
                for symbol, key in zip(call.node.input_tensors, call.reads, strict=True)
            }
            args, kwargs = call.node.arguments.fill_in(given)
            outputs = operation_fn(call.node.operation, training=True)(*args, **kwargs)
            known.update(zip(call.writes, keras.tree.flatten(outputs), strict=True))
        return known

    def _losses(self, scope: Any) -> Any:
        terms = list(scope.losses)
        for layer in self.chunk.layers:
            terms += layer._get_regularization_losses()
        return tf.add_n([tf.reduce_sum(tf.cast(t, tf.float32)) for t in terms] or [tf.zeros([])])


def _values(variables: Sequence[Any]) -> list[Any]:
    found = []
    for variable in variables:
        with on(variable._value.device):
            found.append(variable._value.read_value())
    return found


def _for_microbatch(variable: Any, value: Any, microbatch: Any) -> Any:
    """The state of random numbers for a microbatch: a stream of its own, the first one Keras's."""
    if _SEED not in variable.name:
        return value
    offset = tf.stack([tf.cast(microbatch, value.dtype), tf.zeros([], value.dtype)])
    return value + offset


def _masked(tensors: Sequence[Any], masks: Sequence[Any]) -> list[Any]:
    found = []
    for tensor, mask in zip(tensors, masks, strict=True):
        if mask is not None:
            tensor = tf.identity(tensor)
            tensor._keras_mask = mask
        found.append(tensor)
    return found
