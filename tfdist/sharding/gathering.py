"""Whole weights for the time that a layer uses them (ZeRO stage 3, arXiv:1910.02054).

A weight of which each process keeps a shard is gathered when a layer is called, and again when the
layer's gradients are computed, so that it need not be kept between the two. Only the last one that
was gathered is kept, since the backward pass begins with it. The gradient of a weight's shard is
the sum over the replicas of the whole gradients, each weighed by its replica's examples.

TensorFlow's automatic differentiation makes the operations of the backward pass read the tensors
of the forward pass. When a tape has returned, those that read a whole weight are pointed at a
second one, which is gathered when their other inputs are there.

In the backward pass a process has one large weight or one large gradient at a time: a gradient is
computed when the readers of its weight have run, and the next weight is gathered when that gradient
has been exchanged. Operations are made after those that they depend on, and here they wait only for
such as were made before them, so that there is no circle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._tf.distribute import independently, redirect, wait_for
from tfdist.comm.halves import as_of_halves, is_of_halves
from tfdist.comm.replica_collectives import is_sparse, size_of
from tfdist.sharding.exchange import gather, reduce_scatter, slice_of
from tfdist.sharding.layout import Cut
from tfdist.types import Gradient, Strategy, Tensor

__all__ = ["gather_again", "gathered"]


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


#: Bytes of a gradient that others wait for.
_LARGE = 1 << 18

_uses: weakref.WeakKeyDictionary[Any, list[_Use]] = weakref.WeakKeyDictionary()


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
        graph = tf.compat.v1.get_default_graph()
        _uses.setdefault(graph, []).append(_Use(whole, shard, whole_of, exchanges))
    return whole


@contextmanager
def gather_again() -> Iterator[None]:
    """A block that computes gradients: whole weights of before are gathered again for it."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    uses = [] if graph is None else list(_uses.get(graph, ()))
    if graph is None or not uses:
        yield
        return
    before = len(graph.get_operations())
    yield
    new = {each: index for index, each in enumerate(graph.get_operations()[before:])}
    totals = sorted(
        (
            each.total.op
            for use in uses
            for each in use.exchanges
            if size_of(each.gradient) >= _LARGE and each.total.op in new
        ),
        key=new.__getitem__,
    )

    def last_before(operation: Any) -> list[Any]:
        return [each for each in totals if new[each] < new[operation]][-1:]

    for use in uses:
        consumers = {each for each in use.whole.consumers() if each in new}
        after, readers = _backward(sorted(consumers, key=new.__getitem__), new)
        if after and use is not uses[-1]:
            with tf.control_dependencies([*after, *last_before(readers[0])]):
                again = use.gather(tf.identity(use.shard))
            redirect(readers, use.whole, again)
        for each in use.exchanges:
            gradient = _origin(each.gradient).op
            if each.total.op in totals and gradient in new:
                earlier = [reader for reader in readers if new[reader] < new[gradient]]
                wait_for(gradient, [*last_before(gradient), *earlier])


def _origin(tensor: Tensor) -> Tensor:
    """The tensor whose numbers, in another shape or order, a tensor has."""
    while tensor.op.type in ("Reshape", "Transpose", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor


def _backward(readers: list[Any], new: Mapping[Any, int]) -> tuple[list[Any], list[Any]]:
    """The readers of a weight that wait for others in the backward pass, and what the first awaits.

    Operations are made after those that they depend on, so what the first one awaits waits for none
    of them. Those before it, such as the shape of the weight, run early.
    """
    for index, reader in enumerate(readers):
        awaited = [each for each in reader.inputs if each.op in new]
        if awaited:
            return awaited, readers[index:]
    return [], []
