"""Sums over the replicas, from within a replica."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def sum_over_replicas(values: list[Any]) -> list[Any]:
    """Adds up tensors over all replicas.

    Dense tensors of one type travel together. Sparse gradients stay sparse: the replicas' slices
    are put one after the other, as in one process's gradient of the whole batch. Where all replicas
    hold the very same indices, as for a position embedding, one process has each of them once, so
    their slices are added.

    Args:
        values: dense tensors and `IndexedSlices`, the same number and types on each replica.

    Returns:
        The sums, in the order of `values`.
    """
    context = tf.distribute.get_replica_context()
    by_type: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        sparse = isinstance(value, tf.IndexedSlices)
        by_type.setdefault((sparse, value.dtype), []).append(i)
    sums: dict[int, Any] = {}
    for (sparse, _), places in by_type.items():
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, [values[i] for i in places])
        for i, value in zip(places, reduced, strict=True):
            sums[i] = merged(value, values[i]) if sparse else value
    return [sums[i] for i in range(len(values))]


def merged(gathered: Any, own: Any) -> Any:
    """Adds the replicas' slices where all have the same indices."""
    count = tf.shape(own.indices, gathered.indices.dtype)[0]
    total = tf.shape(gathered.indices, gathered.indices.dtype)[0]
    shape = tf.concat([[-1], tf.shape(own.values, tf.int64)], 0)

    def rows() -> Any:
        return tf.reshape(gathered.indices, tf.stack([-1, tf.maximum(count, 1)]))

    alike = tf.logical_and(count > 0, total % tf.maximum(count, 1) == 0)
    same = tf.cond(
        alike, lambda: tf.reduce_all(rows() == gathered.indices[:count]), lambda: tf.constant(False)
    )
    values = tf.cond(
        same,
        lambda: tf.reduce_sum(tf.reshape(gathered.values, shape), 0),
        lambda: gathered.values,
    )
    indices = tf.cond(same, lambda: gathered.indices[:count], lambda: gathered.indices)
    return tf.IndexedSlices(values, indices, gathered.dense_shape)
