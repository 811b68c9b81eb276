"""Keras's variables as variables of a graph, which sessions initialize, save and restore."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.types import Array, DType, Operation, StatelessScope, Tensor, Variable

__all__ = ["GraphVariables", "assigned", "changed", "read"]

tf1 = tf.compat.v1

#: Arrays of this many numbers or more are fed rather than written into the graph.
_FED_FROM = 64


class GraphVariables:
    """Makes a variable of the default graph for each of Keras's, with its value and its path.

    Args:
        variables: Keras's variables, which must have values.
        trainable: whether the graph's are trainable.
        prefix: is put before their names.
        collections: where the graph keeps them; by default among the global variables.
        devices: for each where it is made; by default and if empty, as the graph decides.
        values: their first values; by default those that Keras's variables have.

    Attributes:
        keras: Keras's variables.
        graph: for each the graph's.
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
        self.keras = list(variables)
        self.feed: dict[Any, Any] = {}
        if values is None:
            values = _values(self.keras)
        self.graph = []
        places = devices or [""] * len(values)
        names = [prefix + name for name in _names(self.keras)]
        for name, value, place in zip(names, values, places, strict=True):
            with tf1.device(place):
                self.graph.append(
                    tf1.get_variable(
                        name,
                        shape=value.shape,
                        dtype=value.dtype,
                        initializer=self._initializer(value),
                        trainable=trainable,
                        collections=None if collections is None else list(collections),
                        aggregation=_aggregation(value.dtype, collections is not None),
                    )
                )

    def read(self) -> list[tuple[Any, Any]]:
        """Keras's variables, each with the value that the graph's has when the step reads it."""
        return read(self.keras, self.graph)

    def assigned(self, before: Sequence[tuple[Any, Any]], scope: StatelessScope) -> list[Any]:
        """Ops that bring what was assigned in a stateless scope into the graph's variables.

        Args:
            before: the result of `read` for the scope.
            scope: the `keras.StatelessScope`, which has ended.
        """
        return assigned(self.graph, before, scope)

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


def read(keys: Sequence[Any], variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Keras's variables with the values that variables of the graph have when they are read."""
    return [(key, each.read_value()) for key, each in zip(keys, variables, strict=True)]


def assigned(
    variables: Sequence[Any], before: Sequence[tuple[Any, Any]], scope: StatelessScope
) -> list[Any]:
    """See `GraphVariables.assigned`."""
    result = (
        changed(variable, value, scope.get_current_value(key))
        for variable, (key, value) in zip(variables, before, strict=True)
    )
    return [op for op in result if op is not None]


def changed(variable: Variable, before: Tensor, after: Tensor | None) -> Operation | None:
    """The op that changes a variable by the result of a computation on a value of it.

    Numbers are added, so that no change of another worker in the meantime is lost.

    Args:
        variable: the graph's.
        before: the value that was read.
        after: the result; None if it did not change.

    Returns:
        An op, or None if nothing changes.
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
