"""The payload of a step to the servers: gradients and changes, each to its variable's server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras.hooks import Flag
from tfdist.strategies.parameter_server.remote_step import parts_of
from tfdist.strategies.parameter_server.servers import Servers, device_of
from tfdist.strategies.parameter_server.transaction_log import WINDOW
from tfdist.strategies.parameter_server.transfer import move
from tfdist.types import Gradient, KerasVariable, Operation, Tensor

__all__ = [
    "Payload",
    "applying",
    "done",
    "guarded",
    "guards",
    "if_missing",
    "leaves_of",
    "only_if",
    "refused_if_forgotten",
    "true_after",
]


class Payload:
    """Gradients and changes, cut to the parts of variables and moved to their servers.

    Args:
        servers: where the variables are.
        gradients: gradients, each with its variable.
        changes: other values to be added to variables, each with its variable.
        common: for sparse gradients that other parts of the batch are added to, which of their rows
            all parts have in common, by their place among the gradients: see `common_rows`.
        distinct: places of such gradients whose rows come once: see `are_distinct`.

    Attributes:
        targets: the TensorFlow variables, or parts of them, that have a gradient or a change.
        values: this gradient or change, on the variable's server.
        common: for places with sparse values, how many of their rows all parts have in common.
            These come first.
        distinct: places with sparse values whose rows come once.
        beside: other tensors on the first server that the transaction needs. A worker that is
            stopped while the lock is held would stop all others if it had anything left to send.
    """

    def __init__(
        self,
        servers: Servers,
        gradients: list[tuple[Any, Any]],
        changes: list[tuple[Any, Any]],
        common: dict[int, Any] | None = None,
        distinct: Collection[int] = (),
    ) -> None:
        self.targets: list[Any] = []
        self.beside: list[Any] = []
        cut: list[Any] = []
        counts: dict[int, Any] = {}
        self.distinct: set[int] = set()
        for index, (value, variable) in enumerate([*gradients, *changes]):
            if isinstance(value, tf.IndexedSlices):
                pieces, first = _cut_rows(value, variable, (common or {}).get(index, False))
                counts.update({len(cut) + i: count for i, count in enumerate(first)})
                if index in distinct:
                    self.distinct.update(range(len(cut), len(cut) + len(pieces)))
            else:
                pieces = _cut(value, variable)
            cut += pieces
            self.targets += parts_of(variable)
        self._gradients = sum(len(parts_of(variable)) for _, variable in gradients)
        homes = [device_of(target) for target in self.targets]
        places = [home for v, home in zip(cut, homes, strict=True) for _ in leaves_of(v)]
        places += [homes[index] for index in counts]
        leaves = [leaf for value in cut for leaf in leaves_of(value)] + list(counts.values())
        moved = iter(move(leaves, [None] * len(leaves), places, servers.wire))
        self.values = [_rebuilt(value, moved) for value in cut]
        self.common = dict(zip(counts, moved, strict=True))

    @property
    def arrived(self) -> list[Any]:
        """Tensors that are there when everything is."""
        leaves = [leaf for value in self.values for leaf in leaves_of(value)]
        return leaves + list(self.common.values()) + self.beside

    def is_change(self, place: int) -> bool:
        """Whether a value is what a step assigned, not a gradient."""
        return place >= self._gradients

    def divide(self, values: list[Any]) -> tuple[list[Any], list[Any], list[tuple[Any, Any]]]:
        """Gradients, their variables, and the changes, each with its variable.

        Args:
            values: the results for the gradients and changes, in the order of `values`.
        """
        count = self._gradients
        changes = list(zip(self.targets[count:], values[count:], strict=True))
        return values[:count], self.targets[:count], changes


def leaves_of(value: Gradient) -> list[Any]:
    """The tensors of a gradient."""
    return [value.values, value.indices] if isinstance(value, tf.IndexedSlices) else [value]


def _cut(value: Gradient, variable: Any) -> list[Any]:
    """The pieces of a value, one for each part of its variable."""
    parts = parts_of(variable)
    return getattr(variable, "_value", variable).split(value) if len(parts) > 1 else [value]


def _cut_rows(
    value: tf.IndexedSlices, variable: KerasVariable, common: Tensor | bool
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


def _chosen(value: tf.IndexedSlices, rows: Tensor) -> tf.IndexedSlices:
    values, indices = (tf.boolean_mask(each, rows) for each in (value.values, value.indices))
    return tf.IndexedSlices(values, indices, value.dense_shape)


def _rebuilt(value: Gradient, moved: Iterator[Any]) -> Gradient:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(next(moved), next(moved), value.dense_shape)
    return next(moved)


# Changes on the servers while an update is applied, each made only on servers that lack it.

#: Set while an optimizer changes weights on the servers.
applying = Flag()

_local = threading.local()


@contextlib.contextmanager
def guards(servers: Servers, todo: dict[str, Any]) -> Iterator[None]:
    """Guards each server's changes, if there are several of which some may have made them.

    Args:
        servers: the servers.
        todo: for each server's device whether it lacks the changes.
    """
    _local.todo = todo if len(servers.devices) > 1 else None
    try:
        yield
    finally:
        _local.todo = None


def if_missing(device: str, change: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """Runs `change` on a server that lacks it, `other` if it has been made before."""
    todo = getattr(_local, "todo", None)
    with tf.device(device):
        return tf.cond(todo[device], change, other) if todo else change()


def done(device: str, change: Callable[[], Any]) -> Tensor:
    """Runs a guarded change and returns a tensor that is there when it is made."""
    return if_missing(device, lambda: true_after(effects_of(change)), lambda: tf.constant(False))


def only_if(condition: Tensor, change: Callable[[], Any]) -> Tensor:
    """Runs a change, which returns True, under a condition; returns the condition."""
    return tf.cond(condition, change, lambda: tf.constant(False))


def refused_if_forgotten(
    device: str, forgotten: Tensor, number: Tensor, after: Operation
) -> Operation:
    """An op that fails, after another, if an update was refused since it came too late."""
    with tf.control_dependencies([after]), tf.device(device):
        return tf.debugging.Assert(
            ~forgotten,
            [
                "The servers refuse an update that may have been applied already: they remember "
                f"the last {WINDOW} updates and those of the training that runs, and this one is "
                "older. Its worker was cut off or stopped for a long time. Number:",
                number,
            ],
        )


def true_after(ops: list[Any]) -> Tensor:
    """A tensor that is there when ops have ended."""
    with tf.control_dependencies(ops):
        return tf.constant(True)


def guarded(device: str, change: Callable[[], Any]) -> object:
    """Runs a change of a variable if its server lacks it."""
    if not getattr(_local, "todo", None):
        return change()
    return done(device, change)


def effects_of(change: Callable[[], Any]) -> list[Any]:
    """Runs a change, and returns an op that ends when all its effects on the servers are done."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    change()
    made = [op for op in graph.get_operations()[before:] if op.op_def.is_stateful]
    return [tf.group(*made)]
