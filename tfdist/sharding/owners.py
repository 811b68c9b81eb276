"""Exchanges of tensors that have an owner each, in a replica context (`tfdist.sharding.layout`).

The tensors of an owner, one after the other, are a stream. Streams travel in rounds of a bounded
size, in which each process has a row of the same length; a shorter stream ends in zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.comm.replica_collectives import Link, by_group, grouped
from tfdist.sharding.layout import Owned
from tfdist.types import Tensor

__all__ = ["gather_from_owners", "reduce_to_owners"]

#: The bytes of all rows of a round.
_ROUND_BYTES = 4 << 20


class _Span(NamedTuple):
    """Some elements of a flat tensor.

    Attributes:
        tensor: its index in the list of all.
        start: the first element.
        stop: the one after the last.
    """

    tensor: int
    start: int
    stop: int


def reduce_to_owners(link: Link, values: Sequence[Any], cuts: Sequence[Owned]) -> list[Tensor]:
    """The sums over the replicas of dense tensors, at the owner of each; elsewhere empty ones.

    Args:
        link: the replicas.
        values: the whole tensors of this replica.
        cuts: the owner of each.
    """
    pairs = list(zip(values, cuts, strict=True))
    return by_group(pairs, grouped(value.dtype for value in values), functools.partial(_sums, link))


def gather_from_owners(link: Link, shards: Sequence[Any], cuts: Sequence[Owned]) -> list[Tensor]:
    """The whole tensors, from the owner of each.

    Args:
        link: the replicas.
        shards: the tensors that this replica owns; of others what has no elements.
        cuts: the owner of each.
    """
    pairs = list(zip(shards, cuts, strict=True))
    groups = grouped(shard.dtype for shard in shards)
    return by_group(pairs, groups, functools.partial(_wholes, link))


def _sums(link: Link, owned: list[tuple[Any, Owned]]) -> list[Tensor]:
    values, cuts = map(list, zip(*owned, strict=True))
    if _are_uneven(cuts):
        sums = link.sum(values)
        pairs = zip(sums, cuts, strict=True)
        return [each if cut.is_here else _empty(cut, each) for each, cut in pairs]
    flat = [tf.reshape(value, [-1]) for value in values]
    pieces: list[list[Tensor]] = [[] for _ in cuts]
    for width, streams in _rounds(cuts, flat[0].dtype.size):
        rows = tf.stack([_packed(flat, spans, width) for spans in streams])
        own = tf.reduce_sum(link.all_to_all(rows), 0)
        _unpack(own, streams[cuts[0].axis.index], pieces)
    return [
        tf.reshape(tf.concat(parts, 0), cut.shape) if cut.is_here else _empty(cut, value)
        for parts, cut, value in zip(pieces, cuts, values, strict=True)
    ]


def _wholes(link: Link, owned: list[tuple[Any, Owned]]) -> list[Tensor]:
    shards, cuts = map(list, zip(*owned, strict=True))
    if _are_uneven(cuts):
        pairs = zip(shards, cuts, strict=True)
        sums: list[Tensor] = link.sum(
            [each if cut.is_here else tf.zeros(cut.shape, each.dtype) for each, cut in pairs]
        )
        return sums
    flat = [tf.reshape(shard, [-1]) for shard in shards]
    pieces: list[list[Tensor]] = [[] for _ in cuts]
    for width, streams in _rounds(cuts, flat[0].dtype.size):
        own = _packed(flat, streams[cuts[0].axis.index], width)
        rows = tf.unstack(tf.reshape(link.gather(own), [link.count, width]))
        for row, spans in zip(rows, streams, strict=True):
            _unpack(row, spans, pieces)
    pairs = zip(pieces, cuts, strict=True)
    return [tf.reshape(tf.concat(parts, 0), cut.shape) for parts, cut in pairs]


def _are_uneven(cuts: Sequence[Owned]) -> bool:
    """Whether a sum of all tensors sends less than rows as long as the longest stream.

    Of n elements in all, a ring's sum sends 2 n (p - 1) / p from each of p processes, and rows of
    length l send l (p - 1).
    """
    lengths = [0] * cuts[0].shards
    for cut in cuts:
        lengths[cut.owner] += cut.size
    return cuts[0].shards * max(lengths) > 2 * sum(lengths)


def _rounds(cuts: Sequence[Owned], itemsize: int) -> Iterator[tuple[int, list[list[_Span]]]]:
    """For each round the length of a row, and what it has of the tensors of each owner."""
    streams: list[list[int]] = [[] for _ in range(cuts[0].shards)]
    for index, cut in enumerate(cuts):
        streams[cut.owner].append(index)
    longest = max(sum(cuts[index].size for index in stream) for stream in streams)
    most = max(1, _ROUND_BYTES // (itemsize * len(streams)))
    for start in range(0, longest, most):
        stop = min(start + most, longest)
        yield stop - start, [list(_spans(stream, cuts, start, stop)) for stream in streams]


def _spans(stream: list[int], cuts: Sequence[Owned], start: int, stop: int) -> Iterator[_Span]:
    """The parts of tensors that the elements from `start` to `stop` of a stream are."""
    before = 0
    for index in stream:
        first, last = max(start - before, 0), min(stop - before, cuts[index].size)
        if first < last:
            yield _Span(index, first, last)
        before += cuts[index].size


def _packed(flat: Sequence[Tensor], spans: Sequence[_Span], width: int) -> Tensor:
    """A row of some length, which ends in zeros."""
    parts = [flat[index][start:stop] for index, start, stop in spans]
    missing = width - sum(stop - start for _, start, stop in spans)
    row: Tensor = tf.concat([*parts, tf.zeros([missing], flat[0].dtype)], 0)
    # Horovod's operations have no state by their registration: of a constant TensorFlow computes
    # one while it optimizes a graph, and again when the graph runs. A copy is not folded.
    return row if parts else tf.raw_ops.DeepCopy(x=row)


def _unpack(row: Tensor, spans: Sequence[_Span], pieces: list[list[Tensor]]) -> None:
    """Appends the elements in a row to the pieces of their tensors."""
    before = 0
    for index, start, stop in spans:
        pieces[index].append(row[before : before + stop - start])
        before += stop - start


def _empty(cut: Owned, like: Tensor) -> Tensor:
    empty: Tensor = tf.zeros(cut.shard_shape, like.dtype)
    return empty
