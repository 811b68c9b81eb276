"""Values computed again with the statistics of the whole batch in place of a replica's own.

A variance is the mean of squared distances from the mean. On one device that is the mean of all
examples; a replica has computed that of its own, and an average over the replicas does not mend the
distances. So what is computed from such a statistic, row by row, is computed once more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist._tf.graphs import run_again
from tfdist.comm.batch_dependence import is_symbolic
from tfdist.keras.batch_axes import batch_axis
from tfdist.keras.example_pairs import Meeting, place_of
from tfdist.keras.reductions import Leaf, leaf_of
from tfdist.keras.replica_context import COMPUTED, Step
from tfdist.keras.whole_batch import as_average, over_whole_batch
from tfdist.types import Tensor

__all__ = ["average_of", "with_whole_statistics"]

#: Ops that add rows to those of a tensor, or take them from it; and how.
_SCATTERS = {"TensorScatterAdd": tf.add, "TensorScatterSub": tf.subtract}


def with_whole_statistics(step: Step, value: Tensor) -> Tensor:
    """A tensor whose rows meet no statistic of this replica's examples alone.

    Terms that are added to rows of a tensor come out as a sum of their own, which can be read off
    the graph. The outputs of layers are taken as they are: layers that normalize a batch do so with
    its own statistics.

    Args:
        step: the calling replica's step.
        value: a symbolic tensor that depends on the batch.

    Returns:
        `value` itself if it is so.
    """
    between = _between(step, value)
    statistics = _meeting_rows(step, between)
    new: dict[int, Any] = {}
    for tensor in between:
        op = tensor.op
        if op.type in _SCATTERS and not step.depends(op.inputs[0]):
            base, indices, updates = (new.get(id(x), x) for x in op.inputs)
            added = tf.scatter_nd(indices, updates, tf.shape(base, indices.dtype))
            new[id(tensor)] = _SCATTERS[op.type](base, added)
        elif op.type == "IdentityN":
            source = op.inputs[tensor.value_index]
            if id(source) in new:
                new[id(tensor)] = new[id(source)]
        elif id(tensor) not in new and any(id(x) in new for x in op.inputs):
            results = run_again(op, [new.get(id(x), x) for x in op.inputs])
            for old, result in zip(op.outputs, results, strict=True):
                new.setdefault(id(old), result)
        if id(tensor) in statistics:
            new[id(tensor)] = _of_whole_batch(step, statistics[id(tensor)], new)
    return new.get(id(value), value)


def average_of(step: Step, value: Tensor, name: str = "A log of the step") -> Tensor:
    """A number whose average over the replicas is its value on the whole batch.

    It has no gradient through statistics that it is computed with: it is for logs and metrics.

    Args:
        step: the calling replica's step.
        value: as of `as_average`.
        name: the beginning of a sentence on it.
    """
    is_number = is_symbolic(value) and value.shape.rank == 0 and value.dtype.is_floating
    if is_number and not step.is_whole:
        value = with_whole_statistics(step, value)
    return as_average(step, value, name=name)


def _of_whole_batch(step: Step, leaf: Leaf, new: dict[int, Any]) -> Tensor:
    chosen = leaf.chosen and (new.get(id(leaf.chosen[0]), leaf.chosen[0]), leaf.chosen[1])
    tensor = new.get(id(leaf.tensor), leaf.tensor)
    own = dataclasses.replace(leaf, tensor=tensor, chosen=chosen)
    [whole] = over_whole_batch(step, [own])
    step.depends.note_shared(whole)
    return whole


def _between(step: Step, value: Tensor) -> list[Tensor]:
    """The tensors from the batch, and from layers' outputs, to a value; each after its inputs."""
    result: list[Tensor] = []
    seen: set[int] = set()
    means = step.averages()
    waiting: list[tuple[Tensor, bool]] = [(value, False)]
    while waiting:
        tensor, is_complete = waiting.pop()
        if is_complete or id(tensor) in means:
            result.append(tensor)
        elif id(tensor) not in seen and step.depends(tensor) and not _is_given(step, tensor):
            waiting.append((tensor, True))
            waiting.extend((x, False) for x in tensor.op.inputs)
        seen.add(id(tensor))
    return result


def _is_given(step: Step, tensor: Tensor) -> bool:
    if id(tensor) in step.held or tensor.op.type == "Placeholder":
        return True
    return id(tensor) in step.outputs and _has_rows(step, tensor)


def _meeting_rows(step: Step, between: list[Tensor]) -> dict[int, Leaf]:
    """The means and sums over examples from which rows are computed, by `id` of their tensors.

    Numbers of examples are not among them: shapes are made of these.
    """
    feeding: set[int] = set()
    result: dict[int, Leaf] = {}
    means = step.averages()
    for tensor in reversed(between):
        leaf = leaf_of(tensor, step.depends, means)
        if leaf is not None and id(tensor) in feeding and not tensor.shape.is_fully_defined():
            step.note_meeting(Meeting(place_of(tensor.op)), COMPUTED)  # Replicas have other sizes.
            continue
        is_exchanged = tensor.dtype.is_floating or tensor.dtype == tf.bool
        if leaf is not None and id(tensor) in feeding and is_exchanged:
            result[id(tensor)] = leaf
        if _has_rows(step, tensor) or (leaf is None and id(tensor) in feeding):
            own = (x for x in tensor.op.inputs if step.depends(x) and not _has_rows(step, x))
            feeding.update(id(x) for x in own)
    return result


def _has_rows(step: Step, tensor: Tensor) -> bool:
    return batch_axis(tensor, step.depends) is not None
