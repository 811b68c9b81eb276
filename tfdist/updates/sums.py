"""Sums over the replicas, from within a replica."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.updates.dependence import Dependence, rows_of


def sum_over_replicas(values: list[Any]) -> list[Any]:
    """Adds up tensors over all replicas.

    Dense tensors of one type travel together. Sparse gradients stay sparse. The rows of lookups by
    example are put one after the other, as in one process's gradient of the whole batch. A lookup
    that does not depend on the batch, such as a position embedding, has each row once on one
    process and on each replica: those rows are added. Optimizers that square gradients row by row
    tell the two apart.

    Args:
        values: dense tensors and `IndexedSlices`, the same number and types on each replica.

    Returns:
        The sums, in the order of `values`.

    Raises:
        tf.errors.InvalidArgumentError: when a step runs, if a lookup that does not depend on the
            batch has other rows on another replica.
    """
    context = tf.distribute.get_replica_context()
    pieces = [pieces_of(value) for value in values]
    flat = [piece.value for each in pieces for piece in each]
    by_type: dict[Any, list[int]] = {}
    for i, value in enumerate(flat):
        by_type.setdefault((isinstance(value, tf.IndexedSlices), value.dtype), []).append(i)
    sums: dict[int, Any] = {}
    for places in by_type.values():
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, [flat[i] for i in places])
        sums.update(zip(places, reduced, strict=True))
    supply = iter(sums[i] for i in range(len(flat)))
    replicas = context.num_replicas_in_sync
    return [joined(each, [next(supply) for _ in each], replicas) for each in pieces]


class Piece(NamedTuple):
    """A gradient, or some rows of a sparse one.

    Attributes:
        value: a dense tensor or `IndexedSlices`.
        alike: whether all replicas look up the same rows in it.
    """

    value: Any
    alike: bool = False


def pieces_of(value: Any) -> list[Piece]:
    """A gradient in the pieces that are to be summed over the replicas."""
    if not isinstance(value, tf.IndexedSlices):
        return [Piece(value)]
    if not tf.is_tensor(value.indices):
        indices = tf.convert_to_tensor(value.indices)
        value = tf.IndexedSlices(value.values, indices, value.dense_shape)
    if hasattr(value.indices, "numpy"):
        _warn_of_eager_rows()
        return [Piece(value)]
    depends = Dependence()
    parts = rows_of(value.indices)
    alike = [not any(depends(source) for source in part.sources) for part in parts]
    if len(set(alike)) == 1:
        return [Piece(value, alike[0])]
    sizes = tf.stack([tf.size(part.like) for part in parts])
    values = tf.split(value.values, sizes, num=len(parts))
    indices = tf.split(value.indices, sizes, num=len(parts))
    slices = [
        tf.IndexedSlices(*each, value.dense_shape) for each in zip(values, indices, strict=True)
    ]
    return [
        Piece(
            _concatenated([p for p, same in zip(slices, alike, strict=True) if same is kind]), kind
        )
        for kind in (False, True)
    ]


def joined(pieces: list[Piece], gathered: list[Any], replicas: int) -> Any:
    """The sum of a gradient over the replicas.

    Args:
        pieces: what `pieces_of` returned.
        gathered: for each piece the sum of a dense tensor, or the rows of all replicas.
        replicas: the number of replicas.
    """
    return _concatenated(
        [
            _added(each, replicas) if piece.alike else each
            for piece, each in zip(pieces, gathered, strict=True)
        ]
    )


def _added(gathered: Any, replicas: int) -> Any:
    """Adds the replicas' rows, of which all have the same."""
    by_replica = tf.reshape(gathered.indices, [replicas, -1])
    alike = tf.debugging.Assert(
        tf.reduce_all(by_replica == by_replica[:1]),
        [
            "Rows that are looked up whatever the batch is differ from replica to replica, so that "
            "their gradients cannot be added. Look up rows that depend on the batch, or the same "
            "rows on each replica."
        ],
    )
    with tf.control_dependencies([alike] if alike is not None else []):
        indices = tf.identity(by_replica[0])
    shape = tf.concat([[replicas, -1], tf.shape(gathered.values)[1:]], 0)
    values = tf.reduce_sum(tf.reshape(gathered.values, shape), 0)
    return tf.IndexedSlices(values, indices, gathered.dense_shape)


def _concatenated(slices: list[Any]) -> Any:
    if len(slices) == 1:
        return slices[0]
    values = tf.concat([each.values for each in slices], 0)
    indices = tf.concat([each.indices for each in slices], 0)
    return tf.IndexedSlices(values, indices, slices[0].dense_shape)


def _warn_of_eager_rows() -> None:
    warnings.warn(
        "A step that runs eagerly (run_eagerly=True) does not show whether the rows that it looks "
        "up depend on the batch. They are taken to: a lookup that does not, such as a position "
        "embedding, counts once for each replica in optimizers that square gradients. Leave "
        "run_eagerly out to train as one process does.",
        stacklevel=2,
    )
