"""Whole weights for the time that a layer uses them (ZeRO stage 3, arXiv:1910.02054).

A weight of which each process keeps a shard is gathered when a layer is called, and again when the
layer's gradients are computed, so that it need not be kept between the two. Only the last one that
was gathered is kept, since the backward pass begins with it. The gradient of a weight's shard is
the sum over the replicas of the whole gradients, each weighed by its replica's examples.

TensorFlow's automatic differentiation makes the operations of the backward pass read the tensors
of the forward pass. When a tape has returned, those that read a whole weight are pointed at a
second one, which is gathered when their other inputs are there.

In the forward pass a weight is gathered while the layer before its own computes. In the backward
pass a process has one large gradient at a time: it is computed when the readers of its weight have
run, and the gradient before it has been exchanged. A weight that is a small part of the model is
gathered while the gradient of the layer before is computed and exchanged; a large one when that has
been done, so that a process has one large weight or one large gradient.

Operations are made after those that they depend on, and here they wait only for such as were made
before them, so that there is no circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._tf.distribute import independently, redirect, wait_for
from tfdist.comm.halves import as_of_halves, is_of_halves
from tfdist.comm.replica_collectives import is_sparse, size_of
from tfdist.sharding.exchange import gather, reduce_scatter, slice_of
from tfdist.sharding.layout import Cut
from tfdist.types import Gradient, Strategy, Tensor

__all__ = ["gather_again", "gathered", "input_before"]


class _Exchange(NamedTuple):
    """A gradient that is summed over the replicas.

    Attributes:
        gradient: of the whole weight, this replica's.
        total: the shard of the sum.
    """

    gradient: Tensor
    total: Tensor


class _Use(NamedTuple):
    """A weight that was gathered.

    Attributes:
        whole: the gathered tensor.
        shard: this process's.
        gather: gathers it again.
        exchanges: its gradients, once a tape has been asked for them.
    """

    whole: Tensor
    shard: Tensor
    gather: Callable[[Tensor], Tensor]
    exchanges: list[_Exchange]


class _Reading(NamedTuple):
    """The part of the backward pass that reads a weight.

    Attributes:
        use: the weight.
        awaited: the operations that the first reader waits for.
        readers: the operations.
    """

    use: _Use
    awaited: list[Any]
    readers: list[Any]


@dataclass
class _Traced:
    """A graph that is being traced.

    Attributes:
        uses: the weights that were gathered, in order.
        last_input: the input of the last layer that was called; None after a backward pass.
    """

    uses: list[_Use] = field(default_factory=list)
    last_input: Tensor | None = None


#: Bytes of a gradient that others wait for.
_LARGE = 1 << 18

#: Weights of a smaller part of all gathered bytes are gathered early in the backward pass. A
#: process then has one such weight beside a large gradient.
_EARLY = 1 / 16

#: The attribute of a graph for its `_Traced`: another place would keep the graph alive.
_TRACED = "_tfdist_gathered"


def _traced() -> _Traced:
    """That of the graph that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, _TRACED):
        setattr(graph, _TRACED, _Traced())
    traced: _Traced = getattr(graph, _TRACED)
    return traced


def input_before(tensor: Tensor) -> Tensor:
    """The input of the layer before in the forward pass, or of the first layer itself.

    Args:
        tensor: the input of a layer that is called now, in a graph.
    """
    traced = _traced()
    before, traced.last_input = traced.last_input, tensor
    return tensor if before is None else before


def gathered(
    strategy: Strategy,
    shard: Tensor,
    cut: Cut,
    weigh: Callable[[Gradient], Gradient],
) -> Tensor:
    """A weight that is divided over the replicas; its shard's gradient is the sum of theirs.

    Args:
        strategy: the strategy, in a replica context of which this is called.
        shard: this process's.
        cut: its division over the replicas.
        weigh: weighs a gradient by this replica's examples.
    """
    link = strategy.link()
    exchanges: list[_Exchange] = []

    def whole_of(own: Tensor) -> Tensor:
        with independently():
            return gather(link, [own], [cut])[0]

    def forward(own: Tensor) -> tuple[Tensor, Callable[[Gradient], Gradient]]:
        def backward(upstream: Gradient) -> Gradient:
            weighed = weigh(upstream)
            if is_sparse(weighed):
                own: Gradient = slice_of(strategy.sum_gradients([weighed])[0], cut)
                return own
            with independently():
                total = reduce_scatter(link, [weighed], [cut])[0]
            exchanges.append(_Exchange(tf.convert_to_tensor(upstream), total))
            return as_of_halves(total) if is_of_halves(upstream) else total

        return whole_of(own), backward

    whole: Tensor = tf.custom_gradient(forward)(shard)
    if not tf.executing_eagerly():
        _traced().uses.append(_Use(whole, shard, whole_of, exchanges))
    return whole


@contextmanager
def gather_again() -> Iterator[None]:
    """A block that computes gradients: whole weights of before are gathered again for it."""
    if tf.executing_eagerly():
        yield
        return
    graph, traced = tf.compat.v1.get_default_graph(), _traced()
    # A weight that the backward pass itself gathers, to compute a layer again, has come just now.
    before, uses = len(graph.get_operations()), list(traced.uses)
    traced.last_input = None
    yield
    traced.last_input = None
    if uses:
        _order(uses, {op: n for n, op in enumerate(graph.get_operations()[before:])})


def _order(uses: list[_Use], new: Mapping[Any, int]) -> None:
    """Gathers weights for the backward pass that has been made, in its order.

    Args:
        uses: the weights.
        new: the operations of the backward pass, with their numbers.
    """
    exchanges = [each for use in uses for each in use.exchanges]
    large = (e.total.op for e in exchanges if size_of(e.gradient) >= _LARGE and e.total.op in new)
    totals = sorted(large, key=new.__getitem__)

    def last_before(operation: Any) -> list[Any]:
        return [each for each in totals if new[each] < new[operation]][-1:]

    readings = [_reading(use, new) for use in uses]
    begun = sorted((e for e in readings if e.awaited), key=lambda e: new[e.readers[0]])
    early = _EARLY * sum(size_of(use.whole) for use in uses)
    for before, reading in zip([*begun[:1], *begun], begun, strict=False):
        use = reading.use
        if use is not uses[-1]:
            at = before if size_of(use.whole) < early else reading
            with tf.control_dependencies([*at.awaited, *last_before(at.readers[0])]):
                again = use.gather(tf.identity(use.shard))
            redirect(reading.readers, use.whole, again)
    for reading in readings:
        for each in reading.use.exchanges:
            gradient = _origin(each.gradient).op
            if each.total.op in totals and gradient in new:
                earlier = [one for one in reading.readers if new[one] < new[gradient]]
                wait_for(gradient, [*last_before(gradient), *earlier])


def _origin(tensor: Tensor) -> Tensor:
    """The tensor whose numbers, in another shape or order, a tensor has."""
    while tensor.op.type in ("Reshape", "Transpose", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor


def _reading(use: _Use, new: Mapping[Any, int]) -> _Reading:
    """The part of the backward pass that reads a weight; it awaits nothing if there is none.

    Operations are made after those that they depend on, so those that the first reader awaits wait
    for none of the readers. Those before it, such as the shape of the weight, run early.
    """
    readers = sorted({op for op in use.whole.consumers() if op in new}, key=new.__getitem__)
    for index, reader in enumerate(readers):
        awaited = [each.op for each in reader.inputs if each.op in new]
        if awaited:
            return _Reading(use, awaited, readers[index:])
    return _Reading(use, [], [])
