"""Whether the rows of a sparse gradient are the batch's, decided from the step's graph alone.

A process that computes on a whole batch has the rows of each example's lookups, one after the
other, and the rows of lookups that no batch takes part in, such as those of positions, once. Values
cannot tell the two apart: parts of a batch may have equal ids by accident. The graph can.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist._tensorflow_graphs import body_of

__all__ = ["common_rows", "depends_on"]

#: Stateful operations that give the same value on all workers that run a step of one moment.
_READS = ("ReadVariableOp", "ResourceGather", "VarHandleOp", "Placeholder")


def depends_on(tensor: Any, sources: Iterable[Any]) -> bool:
    """Whether a tensor may depend on one of the sources, or on a draw of random numbers.

    Sizes of other dimensions than the first do not depend on a batch: the first one is that of its
    examples. Variables that are read are the same for all. A loop or a condition depends on all
    that is given to it; one that reads or draws within counts as a draw.

    Args:
        tensor: a tensor of a graph.
        sources: tensors of the same graph.
    """
    reached, drawn = _origins(tensor)
    return drawn or not reached.isdisjoint(source.name for source in sources)


def common_rows(indices: Any, sources: list[Any]) -> Any:
    """Which rows of a sparse gradient all parts of a batch have in common.

    Several lookups in one table have their rows one after the other.

    Args:
        indices: the rows' places in the table.
        sources: what a part's batch comes from.

    Returns:
        A bool for all rows, or a tensor of shape `(rows,)`.
    """
    pieces = _pieces(indices)
    common = [not depends_on(piece, sources) for piece in pieces]
    if len(set(common)) == 1:
        return common[0]
    return tf.concat([tf.fill(tf.shape(p), c) for p, c in zip(pieces, common, strict=True)], 0)


def _pieces(indices: Any) -> list[Any]:
    """The tensors of rank 1 that were concatenated to one."""
    if indices.op.type == "Identity":
        return _pieces(indices.op.inputs[0])
    if indices.op.type != "ConcatV2" or indices.shape.rank != 1:
        return [indices]
    return [piece for each in list(indices.op.inputs)[:-1] for piece in _pieces(each)]


def _origins(tensor: Any) -> tuple[set[str], bool]:
    """Names of the graph's inputs that a tensor comes from, and whether it has been drawn."""
    seen: set[str] = set()
    reached: set[str] = set()
    waiting = [tensor]
    while waiting:
        current = waiting.pop()
        if current.name in seen:
            continue
        seen.add(current.name)
        op = current.op
        if op.type == "Placeholder":
            reached.add(current.name)
            continue
        body = body_of(op)
        if body is not None:
            inner, drawn = _origins(body.outputs[current.value_index])
            if drawn:
                return reached, True
            places = {each.name: place for place, each in enumerate(body.inputs)}
            waiting += [op.inputs[places[name]] for name in inner if name in places]
        elif op.op_def.is_stateful and op.type not in _READS:
            return reached, True  # it may draw: random numbers, the next batch
        elif not _is_inner_size(op):
            waiting += list(op.inputs)
    return reached, False


def _is_inner_size(op: Any) -> bool:
    """Whether an operation takes the sizes of other dimensions than the first from a shape."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    measured = op.inputs[0].op.inputs[0]
    begin = tf.get_static_value(op.inputs[1])
    if measured.shape.rank is None or begin is None or op.get_attr("begin_mask"):
        return False
    if measured.op.type == "Transpose":
        return False
    step = tf.get_static_value(op.inputs[3])
    return bool(step is not None and step[0] > 0 and begin[0] % measured.shape.rank > 0)
