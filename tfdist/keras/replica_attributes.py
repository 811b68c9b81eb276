"""The tensors that layers keep in attributes, apart for each replica.

Replicas of one process are threads that take turns where one has to wait for the others
(`merge_call`), as when a loss gathers all examples, and in eager steps at each exchange. They share
the program's Python objects: by the time the first one goes on, a layer's attribute that its
`call` has set (an auxiliary loss, attention weights, the losses of `add_loss`) is what the last
replica has set. So each replica finds its layers' attributes as it left them, as if it ran alone.

Other objects of a program's own are shared. A replica that computes with another one's tensor is an
error when it is traced: the gradients would be wrong without a word. Eager steps do not show that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist._tf.distribute import is_distributed, local_replica
from tfdist.errors import ConfigError
from tfdist.keras.hooks import Hook
from tfdist.types import Graph, Layer, Model, Strategy, Structure
from tfdist.utils.thread_state import Current

__all__ = ["Turns", "hooks"]


def hooks() -> list[Hook]:
    """The seams at which replicas take turns, and at which layers are met."""
    return [
        Hook(tf.distribute.ReplicaContext, "merge_call", _with_own_attributes),
        Hook(keras.layers.Layer, "__call__", _known_from_now_on, priority=3),
    ]


class _Kept(NamedTuple):
    """An attribute's value; of a list or a dictionary its contents too."""

    value: object
    contents: list[object] | dict[object, object] | None


#: The attributes of layers by their `id`, each with the layer.
_Attributes = dict[int, tuple[Layer, dict[str, _Kept]]]


class Turns:
    """The replicas of this process in one call of `Strategy.run`.

    Args:
        strategy: the strategy.
        model: the Keras model whose step they run. Other layers are known when they are called.
    """

    def __init__(self, strategy: Strategy, model: Model | None = None) -> None:
        self._several = len(strategy.extended.worker_devices) > 1
        self._before: _Attributes = {}
        #: For each stretch of the graph's ops that a replica has made: first, end, replica.
        self._made: list[tuple[int, int, int]] = []
        if self._several and model is not None:
            for layer in model._flatten_layers():
                self.note(layer)

    @contextlib.contextmanager
    def replica(self) -> Iterator[None]:
        """A block that the calling replica runs in its turns.

        Raises:
            ConfigError: if it has computed with a tensor of another replica.
        """
        if not self._several:
            yield
            return
        self._restore(self._before)
        turn = _Turn(self, local_replica())
        with _turn.set(turn):
            yield
        turn.ends()
        if turn.graph is not None:
            self._check(turn.graph, turn.number)

    def note(self, layer: Layer) -> None:
        """Notes a layer's attributes as they were before, unless they have been noted.

        A layer that is not built makes things that it needs on all replicas: it keeps them.
        """
        if id(layer) not in self._before:
            kept = _attributes_of(layer) if layer.built else {}
            self._before[id(layer)] = (layer, kept)

    def waiting(self, others: Callable[[], Structure]) -> Structure:
        """Runs the others' turns, for which this replica waits; its attributes come back then."""
        kept = {key: (each, _attributes_of(each)) for key, (each, _) in self._before.items()}
        result = others()
        self._restore(kept)
        return result

    def _restore(self, attributes: _Attributes) -> None:
        for layer, kept in attributes.values():
            if kept:
                _restore(layer, kept)

    def note_made(self, first: int, end: int, replica: int) -> None:
        """Notes that a replica has made the ops of the graph from `first` to `end`."""
        self._made.append((first, end, replica))

    def _check(self, graph: Graph, replica: int) -> None:
        """Raises if a replica's ops read what another replica's ops compute."""
        operations = graph.get_operations()
        makers = {id(op): maker for first, end, maker in self._made for op in operations[first:end]}
        for first, end, maker in self._made:
            for op in operations[first:end] if maker == replica else ():
                for tensor in op.inputs:
                    other = makers.get(id(tensor.op), replica)
                    # Captured tensors and constants are made by whoever needs them first.
                    if other != replica and tensor.op.type not in ("Placeholder", "Const"):
                        raise ConfigError(_mixed(tensor.name, op.name, replica, other))


class _Turn:
    """A replica on its thread, from when it goes on to when it waits."""

    def __init__(self, turns: Turns, number: int) -> None:
        self.turns, self.number = turns, number
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._first = self._length()

    def ends(self) -> None:
        self.turns.note_made(self._first, self._length(), self.number)

    def begins(self) -> None:
        self._first = self._length()

    def _length(self) -> int:
        return 0 if self.graph is None else len(self.graph.get_operations())


_turn: Current[_Turn | None] = Current(None)


def _with_own_attributes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Other replicas call the same layers while this one waits."""

    @functools.wraps(original)
    def merge_call(
        self: object, merge_fn: object, args: object = (), kwargs: object = None
    ) -> Structure:
        turn = _turn.value
        if turn is None:
            return original(self, merge_fn, args, kwargs)
        turn.ends()
        result = turn.turns.waiting(lambda: original(self, merge_fn, args, kwargs))
        turn.begins()
        return result

    return merge_call


def _known_from_now_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """A loop written by hand calls layers that nobody has named."""

    @functools.wraps(original)
    def call(self: Layer, *args: Structure, **kwargs: Structure) -> Structure:
        if _turn.value is not None:
            _turn.value.turns.note(self)
        return original(self, *args, **kwargs)

    return call


def _attributes_of(layer: Layer) -> dict[str, _Kept]:
    return {name: _Kept(value, _contents_of(value)) for name, value in vars(layer).items()}


def _contents_of(value: object) -> list[object] | dict[object, object] | None:
    if isinstance(value, list):
        return list(value)
    return dict(value) if isinstance(value, dict) else None


def _restore(layer: Layer, kept: dict[str, _Kept]) -> None:
    """Gives a layer back the tensors that it kept, and takes those that it did not have.

    All else was made outside of the replicas' functions, or does not depend on their examples.
    """
    now = vars(layer)
    for name in [each for each in now if each not in kept and _holds_tensors(now[each])]:
        del now[name]
    for name, old in kept.items():
        value = now.get(name)
        differ = value is not old.value
        if differ and (_holds_tensors(value) or _holds_tensors(old.contents or old.value)):
            now[name] = old.value
        if old.contents is not None:
            _refill(old)


def _refill(kept: _Kept) -> None:
    """Gives a list or a dictionary its contents back; others may hold the same object."""
    there, before = _contents_of(kept.value), kept.contents
    if _same(there, before) or not (_holds_tensors(there) or _holds_tensors(before)):
        return
    if isinstance(kept.value, list) and isinstance(before, list):
        kept.value[:] = before
    elif isinstance(kept.value, dict) and isinstance(before, dict):
        kept.value.clear()
        kept.value.update(before)


def _same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other


def _holds_tensors(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    # Keras's variables are tensors to TensorFlow. The replica that builds a layer makes its own.
    is_variable = isinstance(value, (tf.Variable, keras.Variable)) or is_distributed(value)
    return bool(tf.is_tensor(value)) and not is_variable


def _mixed(tensor: str, reader: str, replica: int, other: int) -> str:
    return (
        f"Replica {replica} computes {reader!r} from {tensor!r}, which replica {other} has "
        "computed from its own examples. The replicas of one process are traced in turns and share "
        "its Python objects, so what one keeps in an object of the program's own, another finds "
        "there. Keep tensors in an attribute of a layer or of the model, of which each replica has "
        "its own; or train with one device in each process (strategy='multi_worker')."
    )
