"""Whole weights for the time that a layer uses them (ZeRO stage 3, arXiv:1910.02054).

A weight of which each process keeps a shard is gathered when a layer is called, and again when the
layer's gradients are computed, so that it need not be kept between the two. The gradient of its
shard is the sum over the replicas of the whole gradients, each weighed by its replica's examples.

TensorFlow's automatic differentiation makes the operations of the backward pass read the tensors
of the forward pass. When a tape has returned, those that read a whole weight are pointed at a
second one, which is gathered when their other inputs are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._tf.distribute import independently, redirect
from tfdist.comm.replica_collectives import is_sparse
from tfdist.sharding.exchange import gather, reduce_scatter, slice_of
from tfdist.sharding.layout import Cut
from tfdist.types import Gradient, Strategy, Tensor

__all__ = ["gather_again", "gathered"]


class _Use(NamedTuple):
    """A weight that was gathered.

    Attributes:
        whole: the gathered tensor.
        shard: this process's.
        gather: gathers it again.
    """

    whole: Tensor
    shard: Tensor
    gather: Callable[[Tensor], Tensor]


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
                return reduce_scatter(link, [weighed], [cut])[0]

        return whole_of(own), backward

    whole: Tensor = tf.custom_gradient(forward)(shard)
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        _uses.setdefault(graph, []).append(_Use(whole, shard, whole_of))
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
    new = {each: place for place, each in enumerate(graph.get_operations()[before:])}
    for use in uses:
        found = {each for each in use.whole.consumers() if each in new}
        after, readers = _backward(sorted(found, key=new.__getitem__), new)
        if after:
            with tf.control_dependencies(after):
                again = use.gather(tf.identity(use.shard))
            redirect(readers, use.whole, again)


def _backward(readers: list[Any], new: Mapping[Any, int]) -> tuple[list[Any], list[Any]]:
    """The readers of a weight that wait for others in the backward pass, and what the first awaits.

    Operations are made after those that they depend on, so what the first one awaits waits for none
    of them. Those before it, such as the shape of the weight, run early.
    """
    for place, reader in enumerate(readers):
        awaited = [each for each in reader.inputs if each.op in new]
        if awaited:
            return awaited, readers[place:]
    return [], []
