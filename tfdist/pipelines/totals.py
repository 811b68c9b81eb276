"""What a loss over a mask is divided by: a number of the whole batch, before its first microbatch.

Such a loss is a sum over what the mask leaves, divided by how much that is; so are those of
`reduction="mean_with_sample_weight"`, by the sum of weights. A microbatch knows its own part of the
number. The whole comes from a graph of model and loss on the whole batch of which only that number
is asked: TensorFlow runs what it depends on, such as `ids != 0`, and leaves out all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.pipelines.cutting import Key
from tfdist.pipelines.parts import Part, Values

__all__ = ["Totals"]

#: From the model's outputs and labels the numbers that losses are divided by, in a graph.
Denominators: TypeAlias = Callable[[Values, Sequence[Any], Any], list[Any]]


class Totals:
    """Computes the numbers.

    Args:
        parts: the chunks of one replica.
        inputs: the model's inputs.
        denominators: see `Denominators`.
    """

    def __init__(
        self, parts: Sequence[Part], inputs: Sequence[Key], denominators: Denominators
    ) -> None:
        self._parts, self._inputs, self._denominators = parts, inputs, denominators
        self._functions: dict[str, Any] = {}

    def of(self, inputs: Sequence[Any], labels: Sequence[Any], nest: Any) -> Any:
        """The numbers for a batch, float64, in the order in which losses ask for them.

        Args:
            inputs: the model's inputs, flat.
            labels: labels and sample weights, flat.
            nest: the structure that the labels are flat of.

        Raises:
            ConfigError: if a mask depends on what a layer with weights or random numbers computes.
        """
        form = repr(nest)
        if form not in self._functions:

            def run(inputs: Sequence[Any], labels: Sequence[Any]) -> Any:
                return self._run(inputs, labels, nest)

            self._functions[form] = tf.function(run, autograph=False, reduce_retracing=True)
        with tf.device("/CPU:0"):
            return self._functions[form](list(inputs), list(labels))

    def _run(self, inputs: Sequence[Any], labels: Sequence[Any], nest: Any) -> Any:
        unknown: set[str] = set()
        known = {key: (each, None) for key, each in zip(self._inputs, inputs, strict=True)}
        values = Values([], [])
        for part in self._parts:
            reads = [known[key] for key in part.chunk.reads]
            given = Values([tensor for tensor, _ in reads], [mask for _, mask in reads])
            weights = [_unknown(weight, unknown) for weight in part.weights]
            state = [_unknown(variable, unknown) for variable in part.state]
            values, _, _ = part.run(weights, state, given, tf.zeros([], tf.int64))
            pairs = zip(values.tensors, values.masks, strict=True)
            known.update(zip(part.chunk.writes, pairs, strict=True))
        found = self._denominators(values, labels, nest)
        _check(found, unknown)
        return tf.stack([tf.cast(each, tf.float64) for each in found])


def _unknown(variable: Any, names: set[str]) -> Any:
    """Stands for a variable's value, which nothing that is asked may depend on."""
    value = tf.identity(tf.zeros(variable.shape, variable.dtype))
    names.add(value.op.name)
    return value


def _check(found: Sequence[Any], unknown: set[str]) -> None:
    seen: set[str] = set()
    left = [tensor.op for tensor in found]
    while left:
        operation = left.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        left += [tensor.op for tensor in operation.inputs]
        left += operation.control_inputs
    if seen & unknown:
        raise ConfigError(
            "strategy='pipeline' cannot average a loss over a mask that depends on what layers "
            "with weights or random numbers compute: the number that it is divided by must be "
            "known before the first microbatch. Give the weights as sample_weight, or use "
            "strategy='single'."
        )
