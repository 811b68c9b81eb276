"""What a step sends to the servers: gradients and changes, each to where its variable is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras.served.step import parts_of
from tfdist.servers.cluster import Servers, device_of
from tfdist.servers.packing import move
from tfdist.servers.slices import fingerprint

__all__ = ["Payload", "leaves_of"]


class Payload:
    """Gradients and changes, cut to the parts of variables and moved to their servers.

    Args:
        servers: where the variables are.
        gradients: gradients, each with its variable.
        changes: what else is to be added to variables, each with its variable.

    Attributes:
        targets: the TensorFlow variables, or parts of them, that something is for.
        values: what it is, on the variable's server.
        marks: for places with sparse values, the fingerprint of the whole variable's indices.
    """

    def __init__(
        self, servers: Servers, gradients: list[tuple[Any, Any]], changes: list[tuple[Any, Any]]
    ) -> None:
        self.targets: list[Any] = []
        self.marks: dict[int, Any] = {}
        cut: list[Any] = []
        for value, variable in [*gradients, *changes]:
            parts = parts_of(variable)
            whole = getattr(variable, "_value", variable)
            pieces = whole.split(value) if len(parts) > 1 else [value]
            if isinstance(value, tf.IndexedSlices):
                mark = fingerprint(value.indices)
                self.marks.update({len(cut) + i: mark for i in range(len(pieces))})
            cut += pieces
            self.targets += parts
        self._gradients = sum(len(parts_of(variable)) for _, variable in gradients)
        places = [
            device_of(t) for v, t in zip(cut, self.targets, strict=True) for _ in leaves_of(v)
        ]
        leaves = [leaf for value in cut for leaf in leaves_of(value)]
        moved = iter(move(leaves, [None] * len(leaves), places, servers.wire))
        self.values = [_rebuilt(value, moved) for value in cut]

    @property
    def arrived(self) -> list[Any]:
        """Tensors that are there when everything is."""
        return [leaf for value in self.values for leaf in leaves_of(value)]

    def divide(self, values: list[Any]) -> tuple[list[Any], list[Any], list[tuple[Any, Any]]]:
        """Gradients, their variables, and the changes, each with its variable.

        Args:
            values: what the gradients and changes have become, in the order of `values`.
        """
        count = self._gradients
        changes = list(zip(self.targets[count:], values[count:], strict=True))
        return values[:count], self.targets[:count], changes


def leaves_of(value: Any) -> list[Any]:
    """The tensors of a gradient."""
    return [value.values, value.indices] if isinstance(value, tf.IndexedSlices) else [value]


def _rebuilt(value: Any, moved: Iterator[Any]) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(next(moved), next(moved), value.dense_shape)
    return next(moved)
