"""The values that a traced step assigns to variables, judged by the graph that computes them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tfdist._tf.graphs import constant_of
from tfdist.comm.batch_dependence import Dependence, is_symbolic
from tfdist.errors import ConfigError, EquivalenceWarning
from tfdist.keras.batch_axes import CHOOSING, ELEMENTWISE, batch_axis, reduces_batch
from tfdist.keras.example_pairs import place_of
from tfdist.keras.hooks import is_of_program
from tfdist.keras.open_batch import SIZE_ADVICE, SIZE_NEEDED
from tfdist.keras.reductions import Reduction, reduction_of
from tfdist.keras.replica_context import Step
from tfdist.keras.whole_batch import check_kept, computed_again, over_whole_batch
from tfdist.keras.whole_statistics import with_whole_statistics
from tfdist.types import KerasVariable, Model, Tensor
from tfdist.utils.messages import warn

__all__ = [
    "at_once",
    "check_constants",
    "holds_examples",
    "is_of_keras",
    "is_of_own_layer",
    "logged_on_whole_batch",
    "on_whole_batch",
]

#: Ops that put rows into a tensor, or choose some of its rows.
_MOVING_ROWS = frozenset(
    {
        *("ConcatV2", "TensorScatterUpdate", "Pack", "XlaDynamicUpdateSlice", "StridedSlice"),
        *("GatherV2", "RandomShuffle", "ReverseV2", "Roll", "Pad", "PadV2", "TopKV2", "Slice"),
        *("Reshape", "Squeeze", "ExpandDims"),
    }
)


def on_whole_batch(
    step: Step, value: Tensor, subject: str, *, of_keras: bool = False
) -> Tensor | None:
    """The value that a weight would have been given on one device.

    Args:
        step: the calling replica's step.
        value: its new value on this replica.
        subject: the weight, at the beginning of a sentence.
        of_keras: whether it is a weight of a layer of Keras's own.

    Returns:
        None if the replicas' values are to be averaged, or are the same.

    Raises:
        ConfigError: if the weight holds examples.
    """
    if not is_symbolic(value) or not step.depends(value):
        return None
    again, result = _judged(step, value, subject, of_keras)
    if result is None or (again is value and (result.unknown or result.is_mean)):
        return again if result is None else None
    return computed_again(again, result, over_whole_batch(step, result.leaves))


def logged_on_whole_batch(step: Step, value: Tensor) -> Tensor | None:
    """The tensor that a step would log on one device.

    Args:
        step: the calling replica's step.
        value: a symbolic tensor, no scalar.

    Returns:
        None if the replicas' tensors are to be averaged, or are the same.
    """
    if not step.depends(value):
        return None
    subject = f"A log (at {place_of(value.op)})"
    if _is_of_examples(step, value):
        [rows], _ = step.gather([value], place_of(value.op))
        return rows
    if value.shape.is_fully_defined() and not holds_examples(step, value):
        return on_whole_batch(step, value, subject)
    warn(
        f"{subject} has numbers of single examples. Each of the {step.replicas} replicas has "
        "examples of its own, and their average is logged. Log a mean or a sum over the examples.",
        EquivalenceWarning,
    )
    return None


def at_once(step: Step, value: Tensor, subject: str) -> Tensor:
    """The value on one device, exchanged where it is computed: the step goes on with it.

    For the arguments and errors see `on_whole_batch`.
    """
    if not is_symbolic(value) or not step.depends(value):
        return value
    again, result = _judged(step, value, subject, of_keras=False)
    if result is not None:
        again = computed_again(again, result, over_whole_batch(step, result.leaves))
        step.depends.note_shared(again)
    return again


def _judged(
    step: Step, value: Tensor, subject: str, of_keras: bool
) -> tuple[Tensor, Reduction | None]:
    """A value with the statistics of the whole batch, and how it is reduced from the examples.

    The latter is None if nothing is left that depends on them.
    """
    if holds_examples(step, value):
        raise ConfigError(
            f"{subject} is given rows of the batch, like a memory bank or a "
            f"queue of examples. With {step.replicas} replicas each has rows of its own, and "
            "tfdist keeps one value of a weight. Gather the rows first "
            "(tf.distribute.get_replica_context().all_gather(rows, axis=0)), or train on one "
            "replica."
        )
    if not of_keras:
        check_kept(step, value)
    # Keras's BatchNormalization normalizes by a replica's own statistics, and keeps these.
    again = value if of_keras else with_whole_statistics(step, value)
    if not step.depends(again):
        return again, None
    result = reduction_of(again, step.depends, step.averages())
    hidden = result.unknown & CHOOSING if of_keras else result.unknown
    if hidden:
        _warn_of_hidden(step, hidden, subject)
    return again, result


#: Ops by which a number is added to a variable's value, or which pass it on.
_ADDING = frozenset({"AddV2", "Add", "AddN", "Sub", "Identity", "Cast"})


def check_constants(step: Step, value: object, subject: str) -> None:
    """Names a constant that may be a number of examples, if the graph has their number in it.

    For the arguments see `on_whole_batch`.
    """
    if not step.is_static or step.is_whole or (is_symbolic(value) and step.depends(value)):
        return
    waiting: list[object] = [value]
    added = []
    while waiting:
        each = waiting.pop()
        constant = constant_of(each) if is_symbolic(each) else np.asarray(each)
        if constant is not None:
            added.append(constant)
        elif is_symbolic(each) and each.op.type in _ADDING:
            waiting.extend(each.op.inputs)
    if any(np.any(each) and not np.any(each % step.size) for each in added):
        warn(
            f"To {subject[0].lower()}{subject[1:]} is added a constant, and {SIZE_NEEDED}. So "
            "tfdist cannot tell whether it is a number of examples. It is taken for one number for "
            f"all of the {step.replicas} replicas. {SIZE_ADVICE}, or leave drop_remainder out.",
            EquivalenceWarning,
        )


def is_of_keras(step: Step, weight: KerasVariable) -> bool:
    """Whether a weight that is not trained is one of a layer of Keras's own."""
    return any(weight is each for each in _weights(step.model, of_program=False))


def is_of_own_layer(step: Step, weight: KerasVariable) -> bool:
    """Whether a weight that is not trained is one of a layer, or model, of the program's own."""
    return any(weight is each for each in _weights(step.model, of_program=True))


def _weights(model: Model, *, of_program: bool) -> Iterator[KerasVariable]:
    """The weights that are not trained, of the layers that are Keras's own or the program's."""
    for layer in model._flatten_layers():
        if is_of_program(type(layer)) is of_program:
            yield from layer._non_trainable_variables


def _warn_of_hidden(step: Step, found: set[str], subject: str) -> None:
    warn(
        f"{subject} is given a value that {', '.join(sorted(found))} computes "
        "from the examples, which is not a mean or sum of them as far as tfdist can tell, such as "
        f"a maximum or a median. Each of the {step.replicas} replicas has examples "
        "of its own, and it gets the average of the replicas' values: if the value is not "
        "a mean over the examples, that is another one than on one device. Compute it from means "
        "and sums, or gather the examples first "
        "(tf.distribute.get_replica_context().all_gather(rows, axis=0)).",
        EquivalenceWarning,
    )


def holds_examples(step: Step, value: Tensor) -> bool:
    """Whether a value has rows of the batch in it, as they are or changed by element."""
    waiting, seen = [value], set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen or not step.depends(tensor):
            continue
        if _is_of_examples(step, tensor):
            return True
        seen.add(id(tensor))
        if tensor.op.type in _MOVING_ROWS | ELEMENTWISE:
            waiting.extend(tensor.op.inputs)
    return False


def _is_of_examples(step: Step, tensor: Tensor) -> bool:
    """Whether a tensor has one row for each example, as far as that is known.

    Only a tensor of the batch has an open shape. If batches have a static size, statistics may have
    it as well: then each op between the batch and the tensor has to pass examples on.
    """
    if not tensor.shape.rank or batch_axis(tensor, step.depends) is None:
        return False
    return tensor.shape[0] is None or (step.is_static and _passes_examples(tensor, step.depends))


#: Ops of which a result has no row for each example, though an input has.
_SUMMING = frozenset(
    {
        *("UnsortedSegmentSum", "SegmentSum", "Bincount", "DenseBincount", "Einsum", "ScatterNd"),
        *("TensorScatterAdd", "TensorScatterSub"),
    }
)


def _passes_examples(tensor: Tensor, depends: Dependence) -> bool:
    """Whether a tensor has a batch axis that each op from the batch on has passed on.

    That is stricter than `batch_axis`, to which the result of any op that it does not know has one.
    """
    seen: set[int] = set()
    waiting = [tensor]
    while waiting:
        each = waiting.pop()
        known = id(each) in seen or batch_axis(each, depends) is None
        seen.add(id(each))
        if known or each.op.type in _SUMMING:
            continue
        if each.op.type in CHOOSING and reduces_batch(each.op, depends):
            continue
        if each.op.type == "Placeholder":
            return True
        waiting.extend(each.op.inputs)
    return False
