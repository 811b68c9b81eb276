"""Exchanges between whole tensors and their shards, in a replica context.

A reduce-scatter is an all-to-all and a sum: TensorFlow's own op has no implementation on CPUs.
Small tensors travel together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.comm.batch_dependence import Kind, of_kind
from tfdist.comm.replica_collectives import (
    ALONE_BYTES,
    Link,
    by_group,
    grouped,
    is_sparse,
    pieces_of,
    size_of,
)
from tfdist.sharding.layout import Cut, Layout, Owned
from tfdist.sharding.owners import gather_from_owners, reduce_to_owners
from tfdist.types import IndexedSlices, Tensor

__all__ = ["gather", "own_shard", "reduce_scatter", "slice_of"]

#: Small tensors are exchanged together up to so many bytes.
_BUCKET_BYTES = 4 << 20


def reduce_scatter(link: Link, values: Sequence[Any], cuts: Sequence[Cut]) -> list[Tensor]:
    """The sums over the replicas of dense tensors, of each the shard of this one.

    Args:
        link: the replicas.
        values: undivided tensors.
        cuts: the division of each over them.
    """
    return _by_kind(link, values, cuts, _reduced_slices, reduce_to_owners)


def _reduced_slices(link: Link, values: Sequence[Any], cuts: Sequence[Cut]) -> list[Tensor]:
    def exchange(bucket: list[Tensor]) -> list[Tensor]:
        packed = tf.concat(bucket, 1) if len(bucket) > 1 else bucket[0]
        own = tf.add_n(tf.unstack(link.all_to_all(packed), link.count))
        return tf.split(own, [each.shape[1] for each in bucket]) if len(bucket) > 1 else [own]

    rows = [_to_rows(value, cut) for value, cut in zip(values, cuts, strict=True)]
    shards = by_group(rows, _buckets(rows), exchange)
    return [tf.reshape(s, cut.shard_shape) for s, cut in zip(shards, cuts, strict=True)]


def gather(link: Link, shards: Sequence[Any], cuts: Sequence[Cut]) -> list[Tensor]:
    """Undivided tensors from the shards of all replicas.

    Args:
        link: the replicas.
        shards: this replica's.
        cuts: the division of each over them.
    """
    return _by_kind(link, shards, cuts, _gathered_slices, gather_from_owners)


def _gathered_slices(link: Link, shards: Sequence[Any], cuts: Sequence[Cut]) -> list[Tensor]:
    def exchange(bucket: list[Tensor]) -> list[Tensor]:
        packed = tf.concat(bucket, 0) if len(bucket) > 1 else bucket[0]
        rows = tf.reshape(link.gather(packed), [link.count, -1])
        return tf.split(rows, [each.shape[0] for each in bucket], 1) if len(bucket) > 1 else [rows]

    flat = [tf.reshape(shard, [-1]) for shard in shards]
    tables = by_group(flat, _buckets(flat), exchange)
    return [_from_rows(rows, cut) for rows, cut in zip(tables, cuts, strict=True)]


def _by_kind(
    link: Link,
    values: Sequence[Any],
    cuts: Sequence[Cut],
    of_slices: Callable[..., list[Tensor]],
    of_owned: Callable[..., list[Tensor]],
) -> list[Tensor]:
    """Exchanges tensors that are cut in slices, and those that have an owner, by themselves."""

    def exchange(group: list[tuple[Any, Cut]]) -> list[Tensor]:
        run = of_owned if isinstance(group[0][1], Owned) else of_slices
        return run(link, *map(list, zip(*group, strict=True)))

    pairs = list(zip(values, cuts, strict=True))
    return by_group(pairs, grouped(isinstance(cut, Owned) for cut in cuts), exchange)


def own_shard(whole: Any, layout: Layout) -> Tensor:
    """This process's shard of a whole dense tensor."""
    for cut in layout.cuts:
        whole = slice_of(whole, cut)
    shard: Tensor = whole
    return shard


def slice_of(value: Any, cut: Cut) -> Any:
    """This process's part of a tensor, or of a gradient that has the rows of a table only.

    Args:
        value: an undivided dense tensor, or `IndexedSlices` of one.
        cut: its division.
    """
    if is_sparse(value):
        return _own_rows(value, cut)
    begin, size = [0] * len(cut.shape), list(cut.shard_shape)
    begin[cut.dimension] = cut.start
    return tf.slice(value, begin, size)


def _own_rows(value: IndexedSlices, cut: Cut) -> IndexedSlices:
    """Rows stay rows: an adaptive optimizer leaves the others of a table alone."""
    shape = tf.constant(cut.shard_shape, value.indices.dtype)
    if cut.dimension > 0:
        begin, size = [0] * len(cut.shape), [-1] * len(cut.shape)
        begin[cut.dimension] = cut.start
        size[cut.dimension] = cut.shard_shape[cut.dimension]
        columns: IndexedSlices = tf.IndexedSlices(
            tf.slice(value.values, begin, size), value.indices, shape
        )
        return columns
    pieces = [
        _own_piece(each.value, each.kind, cut) for each in pieces_of(value) if is_sparse(each.value)
    ]
    rows = tf.concat([each for each, _ in pieces], 0) if len(pieces) > 1 else pieces[0][0]
    parts = [each for _, each in pieces]
    indices = tf.concat(parts, 0) if len(pieces) > 1 else parts[0]
    own: IndexedSlices = tf.IndexedSlices(rows, indices, shape)
    return own


def _own_piece(value: IndexedSlices, kind: Kind, cut: Cut) -> tuple[Tensor, Tensor]:
    """Those rows of one kind that are in this process's part, and their places in it."""
    here = (value.indices >= cut.start) & (value.indices < cut.stop)
    indices = of_kind(tf.boolean_mask(value.indices, here) - cut.start, kind)
    return tf.boolean_mask(value.values, here), indices


def _to_rows(value: Tensor, cut: Cut) -> Tensor:
    """A whole tensor as one row for each shard."""
    before, shards, after = cut.blocks
    if before > 1:
        value = tf.transpose(tf.reshape(value, [before, shards, after]), [1, 0, 2])
    rows: Tensor = tf.reshape(value, [shards, before * after])
    return rows


def _from_rows(rows: Tensor, cut: Cut) -> Tensor:
    before, shards, after = cut.blocks
    if before > 1:
        rows = tf.transpose(tf.reshape(rows, [shards, before, after]), [1, 0, 2])
    whole: Tensor = tf.reshape(rows, cut.shape)
    return whole


def _buckets(tensors: list[Tensor]) -> Iterator[list[int]]:
    """The indices of tensors that are exchanged together: small ones of one type."""
    for group in grouped(tensor.dtype for tensor in tensors):
        bucket: list[int] = []
        size = 0
        for index in group:
            bytes_of = size_of(tensors[index])
            if bytes_of >= ALONE_BYTES:
                yield [index]
                continue
            if bucket and size + bytes_of > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(index)
            size += bytes_of
        if bucket:
            yield bucket
