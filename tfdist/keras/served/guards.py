"""Changes on the servers while an update is applied, and where they were made before."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras.flags import Flag
from tfdist.servers.cluster import Servers
from tfdist.servers.ledger import WINDOW

__all__ = [
    "applying",
    "done",
    "guarded",
    "guards",
    "if_missing",
    "only_if",
    "refused_if_forgotten",
    "true_after",
]

#: Up where an optimizer changes weights on the servers.
applying = Flag()

_local = threading.local()


@contextlib.contextmanager
def guards(servers: Servers, todo: dict[str, Any]) -> Iterator[None]:
    """Guards each server's changes, where there are several of which some may have made them.

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
    """Runs `change` on a server that lacks it, `other` where it has been made before."""
    todo = getattr(_local, "todo", None)
    with tf.device(device):
        return tf.cond(todo[device], change, other) if todo else change()


def done(device: str, change: Callable[[], Any]) -> Any:
    """Runs a guarded change and returns a tensor that is there when it is made."""
    return if_missing(device, lambda: true_after(effects_of(change)), lambda: tf.constant(False))


def only_if(condition: Any, change: Callable[[], Any]) -> Any:
    """Runs a change, which returns True, under a condition; returns the condition."""
    return tf.cond(condition, change, lambda: tf.constant(False))


def refused_if_forgotten(device: str, forgotten: Any, number: Any, after: Any) -> Any:
    """An op that fails, after another, where an update was refused since it came too late."""
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


def true_after(ops: list[Any]) -> Any:
    """A tensor that is there when ops have ended."""
    with tf.control_dependencies(ops):
        return tf.constant(True)


def guarded(device: str, change: Callable[[], Any]) -> Any:
    """Runs a change of a variable where its server lacks it."""
    if not getattr(_local, "todo", None):
        return change()
    return done(device, change)


def effects_of(change: Callable[[], Any]) -> list[Any]:
    """Runs a change, and returns what ends when all that it does to the servers is done."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    change()
    made = [op for op in graph.get_operations()[before:] if op.op_def.is_stateful]
    return [tf.group(*made)]
