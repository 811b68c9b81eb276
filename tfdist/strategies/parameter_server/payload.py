"""The payload of a step to the servers: gradients and changes, each to its variable's server."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.comm.replica_collectives import is_sparse
from tfdist.strategies.parameter_server.serialization import move
from tfdist.strategies.parameter_server.servers import Servers, device_of, parts_of
from tfdist.types import Gradient, IndexedSlices, Tensor
from tfdist.utils.thread_state import Current, Flag

__all__ = [
    "Change",
    "Payload",
    "applying",
    "done",
    "effects_of",
    "guarded",
    "guards",
    "if_missing",
    "of_server",
    "only_if",
    "scaled",
    "true_after",
]


@dataclasses.dataclass(frozen=True)
class Change:
    """A gradient of a variable, or a value that a step adds to one.

    Attributes:
        variable: a Keras or TensorFlow variable.
        value: a tensor or `IndexedSlices`.
        assigned: whether the value is what a step assigned, not a gradient.
        common: of `IndexedSlices` that those of other parts of the batch are added to, which of
            their rows all parts have in common (see `common_rows`). In a payload these come first,
            and this is how many they are.
        distinct: whether the rows of such come once: see `are_distinct`.
        of_halves: whether it is a gradient that was computed in float16 (see `is_of_halves`).
    """

    variable: Any
    value: Gradient
    assigned: bool = False
    common: Tensor | bool | None = None
    distinct: bool = False
    of_halves: bool = False

    @property
    def leaves(self) -> list[Any]:
        """The tensors that travel."""
        if not is_sparse(self.value):
            return [self.value]
        counted = [] if self.common is None else [self.common]
        return [self.value.values, self.value.indices, *counted]

    def pieces(self) -> list[Change]:
        """The changes of the parts of the variable."""
        parts = parts_of(self.variable)
        values, counts = self._cut(self.value), [None] * len(parts)
        if isinstance(self.common, bool):
            counts = [tf.size(v.indices) if self.common else tf.constant(0) for v in values]
        elif is_sparse(self.value) and self.common is not None:
            rows = self.common
            front, back = (self._cut(_chosen(self.value, r)) for r in (rows, ~rows))
            counts = [tf.size(each.indices) for each in front]
            values = [_joined(*both) for both in zip(front, back, strict=True)]
        return [
            dataclasses.replace(self, variable=part, value=value, common=count)
            for part, value, count in zip(parts, values, counts, strict=True)
        ]

    def with_leaves(self, moved: Iterator[Any]) -> Change:
        """The same of other tensors, which are taken from an iterator."""
        if not is_sparse(self.value):
            return dataclasses.replace(self, value=next(moved))
        value = tf.IndexedSlices(next(moved), next(moved), self.value.dense_shape)
        common = None if self.common is None else next(moved)
        return dataclasses.replace(self, value=value, common=common)

    def _cut(self, value: Gradient) -> list[Any]:
        if len(parts_of(self.variable)) == 1:
            return [value]
        return list(getattr(self.variable, "_value", self.variable).split(value))


def _chosen(value: IndexedSlices, rows: Tensor) -> IndexedSlices:
    values, indices = (tf.boolean_mask(each, rows) for each in (value.values, value.indices))
    return tf.IndexedSlices(values, indices, value.dense_shape)


def _joined(front: IndexedSlices, back: IndexedSlices) -> IndexedSlices:
    values = tf.concat([front.values, back.values], 0)
    return tf.IndexedSlices(values, tf.concat([front.indices, back.indices], 0), front.dense_shape)


def scaled(grad: Gradient, by: Callable[[Tensor], Tensor]) -> Gradient:
    """A gradient whose numbers a function has changed."""
    if is_sparse(grad):
        return tf.IndexedSlices(by(grad.values), grad.indices, grad.dense_shape)
    return by(grad)


class Payload:
    """Gradients and changes, cut to the parts of variables and moved to their servers.

    Args:
        servers: where the variables are.
        changes: the gradients first, then other values to be added to variables.
        beside: other tensors on the first server that the transaction needs. A worker that is
            stopped while the lock is held would stop all others if it had anything left to send.

    Attributes:
        pieces: the changes of TensorFlow variables or parts of them, on the variable's server.
    """

    def __init__(
        self, servers: Servers, changes: Sequence[Change], beside: Sequence[Tensor] = ()
    ) -> None:
        pieces = [piece for change in changes for piece in change.pieces()]
        homes = [device_of(piece.variable) for piece in pieces for _ in piece.leaves]
        leaves = [leaf for piece in pieces for leaf in piece.leaves]
        # One call for all: pieces for the same server share transfers (see `move`).
        moved = iter(move(leaves, [None] * len(leaves), homes, servers.wire))
        self.pieces = [piece.with_leaves(moved) for piece in pieces]
        self._beside = beside

    @property
    def arrived(self) -> list[Any]:
        """Tensors that are there when everything is."""
        return [*(leaf for piece in self.pieces for leaf in piece.leaves), *self._beside]


# Changes on the servers while an update is applied, each made only on servers that lack it.

#: Set while an optimizer changes weights on the servers.
applying = Flag()

#: For each server's device whether it lacks the changes that are made.
_todo: Current[dict[str, Any] | None] = Current(None)


def guards(servers: Servers, todo: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Guards each server's changes, if there are several of which some may have made them."""
    # A single server's ledger decides before this whether there is a change to make at all. Only
    # with several can a worker have died between two of them, and left some with the change.
    return _todo.set(todo if len(servers.devices) > 1 else None)


def if_missing(device: str, change: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """Runs `change` on a server that lacks it, `other` if it has been made before."""
    todo = _todo.value
    with tf.device(device):
        return tf.cond(todo[device], change, other) if todo else change()


def done(device: str, change: Callable[[], Any]) -> Tensor:
    """Runs a guarded change and returns a tensor that is there when it is made."""
    return if_missing(device, lambda: true_after(effects_of(change)), lambda: tf.constant(False))


def guarded(device: str, change: Callable[[], Any]) -> object:
    """Runs a change of a variable if its server lacks it."""
    return done(device, change) if _todo.value else change()


def only_if(condition: Tensor, change: Callable[[], Any]) -> Tensor:
    """Runs a change, which returns True, under a condition; returns the condition."""
    return tf.cond(condition, change, lambda: tf.constant(False))


def true_after(ops: list[Any]) -> Tensor:
    """A tensor that is there when ops have ended."""
    with tf.control_dependencies(ops):
        return tf.constant(True)


def effects_of(change: Callable[[], Any]) -> list[Any]:
    """Runs a change, and returns the ops that have effects on the servers."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    change()
    return [op for op in graph.get_operations()[before:] if op.op_def.is_stateful]


def of_server(effects: Sequence[Any], device: str) -> list[Any]:
    """Those of the effects of a change that are a server's, and those of no known device."""
    return [each for each in effects if each.device in (device, "")]
