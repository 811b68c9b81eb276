"""What a step sends to the servers: gradients and changes, each to where its variable is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras.served.step import parts_of
from tfdist.servers.cluster import Servers, device_of
from tfdist.servers.packing import move

__all__ = ["Payload", "leaves_of"]


class Payload:
    """Gradients and changes, cut to the parts of variables and moved to their servers.

    Args:
        servers: where the variables are.
        gradients: gradients, each with its variable.
        changes: what else is to be added to variables, each with its variable.
        common: for sparse gradients that other parts of the batch are added to, which of their rows
            all parts have in common, by their place among the gradients: see `common_rows`.

    Attributes:
        targets: the TensorFlow variables, or parts of them, that something is for.
        values: what it is, on the variable's server.
        common: for places with sparse values, how many of their rows all parts have in common.
            These come first.
        beside: other tensors on the first server that the transaction needs. A worker that is
            stopped while the lock is held would stop all others if it had anything left to send.
    """

    def __init__(
        self,
        servers: Servers,
        gradients: list[tuple[Any, Any]],
        changes: list[tuple[Any, Any]],
        common: dict[int, Any] | None = None,
    ) -> None:
        self.targets: list[Any] = []
        self.beside: list[Any] = []
        cut: list[Any] = []
        counts: dict[int, Any] = {}
        for place, (value, variable) in enumerate([*gradients, *changes]):
            if isinstance(value, tf.IndexedSlices):
                pieces, first = _cut_rows(value, variable, (common or {}).get(place, False))
                counts.update({len(cut) + i: count for i, count in enumerate(first)})
            else:
                pieces = _cut(value, variable)
            cut += pieces
            self.targets += parts_of(variable)
        self._gradients = sum(len(parts_of(variable)) for _, variable in gradients)
        homes = [device_of(target) for target in self.targets]
        places = [home for v, home in zip(cut, homes, strict=True) for _ in leaves_of(v)]
        places += [homes[place] for place in counts]
        leaves = [leaf for value in cut for leaf in leaves_of(value)] + list(counts.values())
        moved = iter(move(leaves, [None] * len(leaves), places, servers.wire))
        self.values = [_rebuilt(value, moved) for value in cut]
        self.common = dict(zip(counts, moved, strict=True))

    @property
    def arrived(self) -> list[Any]:
        """Tensors that are there when everything is."""
        leaves = [leaf for value in self.values for leaf in leaves_of(value)]
        return leaves + list(self.common.values()) + self.beside

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


def _cut(value: Any, variable: Any) -> list[Any]:
    """The pieces of a value, one for each part of its variable."""
    parts = parts_of(variable)
    return getattr(variable, "_value", variable).split(value) if len(parts) > 1 else [value]


def _cut_rows(
    value: tf.IndexedSlices, variable: Any, common: Any
) -> tuple[list[tf.IndexedSlices], list[Any]]:
    """The pieces of a sparse value, and how many rows at the front of each are common ones."""
    if isinstance(common, bool):
        pieces = _cut(value, variable)
        return pieces, [tf.size(p.indices) if common else tf.constant(0) for p in pieces]
    front, back = (_cut(_chosen(value, rows), variable) for rows in (common, ~common))
    pieces = [
        tf.IndexedSlices(
            tf.concat([f.values, b.values], 0),
            tf.concat([f.indices, b.indices], 0),
            f.dense_shape,
        )
        for f, b in zip(front, back, strict=True)
    ]
    return pieces, [tf.size(each.indices) for each in front]


def _chosen(value: tf.IndexedSlices, rows: Any) -> tf.IndexedSlices:
    values, indices = (tf.boolean_mask(each, rows) for each in (value.values, value.indices))
    return tf.IndexedSlices(values, indices, value.dense_shape)


def _rebuilt(value: Any, moved: Iterator[Any]) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(next(moved), next(moved), value.dense_shape)
    return next(moved)
