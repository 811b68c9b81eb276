"""Keras's variables as variables of a graph, which sessions initialize, save and restore."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.types import Array, DType, Operation, StatelessScope, Tensor, Variable

__all__ = ["GraphVariables", "Pairs", "changed"]

tf1 = tf.compat.v1

#: Arrays of this many numbers or more are fed rather than written into the graph.
_FED_FROM = 64


@dataclasses.dataclass
class Pairs:
    """Keras's variables, and for each a variable of the graph."""

    keras: Sequence[Any]
    graph: Sequence[Any]

    def read(self) -> list[tuple[Any, Any]]:
        """Keras's variables, each with the value that the graph's has when the step reads it."""
        return [(k, each.read_value()) for k, each in zip(self.keras, self.graph, strict=True)]

    def assigned(self, before: Sequence[tuple[Any, Any]], scope: StatelessScope) -> list[Any]:
        """Ops for the assignments of a scope, which has ended, to the values that were read."""
        result = (
            changed(variable, value, scope.get_current_value(key))
            for variable, (key, value) in zip(self.graph, before, strict=True)
        )
        return [op for op in result if op is not None]


class GraphVariables(Pairs):
    """Makes a variable of the default graph for each of Keras's, with its value and its path.

    Args:
        variables: Keras's variables, which must have values.
        trainable: whether the graph's are trainable.
        prefix: is put before their names.
        collections: where the graph keeps them; by default among the global variables.
        devices: for each where it is made; by default and if empty, as the graph decides.
        values: their first values; by default those that Keras's variables have.

    Attributes:
        feed: initial values by placeholder, for `Scaffold(init_feed_dict=…)`. Values that are large
            would make the graph large, with a limit of 2 GB.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        *,
        trainable: bool = False,
        prefix: str = "",
        collections: Sequence[str] | None = None,
        devices: Sequence[str] | None = None,
        values: Sequence[Any] | None = None,
    ) -> None:
        self.feed: dict[Any, Any] = {}
        if values is None:
            values = _values(variables)
        graph = []
        devices = devices or [""] * len(values)
        for name, value, device in zip(_names(variables), values, devices, strict=True):
            with tf1.device(device):
                variable = tf1.get_variable(
                    prefix + name,
                    shape=value.shape,
                    dtype=value.dtype,
                    initializer=self._initializer(value),
                    trainable=trainable,
                    collections=None if collections is None else list(collections),
                    aggregation=_aggregation(value.dtype, collections is not None),
                )
            graph.append(variable)
        super().__init__(list(variables), graph)

    def _initializer(self, value: Array) -> Callable[..., Any]:
        if value.size < _FED_FROM:
            return tf1.constant_initializer(value)
        if (value == value.flat[0]).all():
            return tf1.constant_initializer(value.flat[0])

        def fed(shape: object, dtype: object = None, partition_info: object = None) -> Tensor:
            del partition_info
            placeholder = tf1.placeholder(dtype, shape)
            self.feed[placeholder] = value
            return placeholder

        return fed


def _values(variables: Sequence[Any]) -> list[Any]:
    """The values of Keras's variables on the first replica of this process."""
    with eagerly_outside_of_scope():
        parts = [
            each.values[0] if isinstance(each, tf.distribute.DistributedValues) else each
            for each in (variable.value for variable in variables)
        ]
        return [np.asarray(part.numpy()) for part in parts]


def changed(variable: Variable, before: Tensor, after: Tensor | None) -> Operation | None:
    """The op that changes a variable of the graph from a value that was read to the result.

    Numbers are added, so that no change of another worker in the meantime is lost. The result is
    None, and so is the op, if nothing changes.
    """
    if after is None or after is before:
        return None
    after = tf.cast(after, before.dtype)
    with tf1.device(variable.device):
        if before.dtype.is_floating or before.dtype in (tf.int32, tf.int64):
            return variable.assign_add(after - before, read_value=False)
        return variable.assign(after, read_value=False)


def _aggregation(dtype: DType, is_metric: bool) -> object:
    """The aggregation of a variable that each replica changes: statistics become their mean."""
    if is_metric:
        return tf.VariableAggregation.SUM
    if tf.as_dtype(dtype).is_floating:
        return tf.VariableAggregation.MEAN
    return tf.VariableAggregation.ONLY_FIRST_REPLICA


def _names(variables: Sequence[Any]) -> list[str]:
    """Names for a graph: Keras's paths, with a number if they recur."""
    seen: dict[str, int] = {}
    names = []
    for variable in variables:
        name = re.sub(r"[^A-Za-z0-9_.\-/]", "_", variable.path)
        count = seen[name] = seen.get(name, -1) + 1
        names.append(f"{name}_{count}" if count else name)
    return names
