"""The values that a traced step assigns to variables, judged by the graph that computes them."""

from __future__ import annotations

import warnings

from tfdist.comm.batch_dependence import Dependence, is_symbolic
from tfdist.errors import ConfigError, EquivalenceWarning
from tfdist.keras.reductions import (
    CHOOSING,
    ELEMENTWISE,
    batch_axis,
    passes_examples,
    reduction_of,
)
from tfdist.keras.replica_context import Step
from tfdist.keras.whole_batch import computed_again, over_whole_batch
from tfdist.types import KerasVariable, Tensor

__all__ = ["on_whole_batch", "warn_unless_added"]

#: Ops that put rows into a tensor, or choose some of its rows.
_MOVING_ROWS = frozenset(
    {
        *("ConcatV2", "TensorScatterUpdate", "Pack", "XlaDynamicUpdateSlice", "StridedSlice"),
        *("GatherV2", "RandomShuffle", "ReverseV2", "Roll", "Pad", "PadV2", "TopKV2", "Slice"),
        *("Reshape", "Squeeze", "ExpandDims"),
    }
)
#: Ops through which a tensor passes as it is.
_PASSING = frozenset({"Identity", "Cast", "StopGradient", "StridedSlice", "Reshape", "EnsureShape"})
#: Ops by which something is added to their first input, or to any of them.
_ADDING = frozenset(
    {"AddV2", "Add", "AddN", "Sub", "TensorScatterAdd", "TensorScatterSub", *_PASSING}
)


def on_whole_batch(step: Step, value: Tensor, name: str) -> Tensor | None:
    """The value that a weight would have been given on one device.

    Args:
        step: the calling replica's step.
        value: the weight's new value on this replica.
        name: the weight's name.

    Returns:
        None if the replicas' values are to be averaged, or are the same.

    Raises:
        ConfigError: if the weight holds examples.
    """
    if not is_symbolic(value) or not step.depends(value):
        return None
    if _holds_examples(step, value):
        raise ConfigError(
            f"The weight {name!r} is given rows of the batch, like a memory bank or a queue of "
            f"examples. With {step.replicas} replicas each has rows of its own, and tfdist keeps "
            "one value of a weight. Gather the rows first (tf.distribute.get_replica_context()"
            ".all_gather(rows, axis=0)), or train on one replica."
        )
    result = reduction_of(value, step.depends, step.averages())
    chosen = result.unknown & CHOOSING
    if chosen:
        _warn_of_chosen(step, chosen, name)
    if result.unknown or result.is_mean:
        return None
    return computed_again(value, result, over_whole_batch(step, result.leaves))


def _warn_of_chosen(step: Step, found: set[str], name: str) -> None:
    warnings.warn(
        f"The weight {name!r} is given a value that {', '.join(sorted(found))} computes "
        f"from the examples, such as a maximum. Each of the {step.replicas} replicas has examples "
        "of its own, and the weight gets the average of the replicas' values: if the value is not "
        "a mean over the examples, that is another one than on one device. Compute it from means "
        "and sums, or gather the examples first "
        "(tf.distribute.get_replica_context().all_gather(rows, axis=0)).",
        EquivalenceWarning,
        stacklevel=2,
    )


def _holds_examples(step: Step, value: Tensor) -> bool:
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
    return tensor.shape[0] is None or (step.even and passes_examples(tensor, step.depends))


def warn_unless_added(
    depends: Dependence, variable: KerasVariable, value: Tensor, old: Tensor | None
) -> None:
    """Warns of a metric's variable that is not given its old value plus something.

    Replicas' states of metrics are added up when they are read.

    Args:
        depends: returns whether a tensor depends on the batch.
        variable: the metric's Keras variable.
        value: its new value.
        old: its present value, if that is not a variable's value.
    """
    if not is_symbolic(value) or not depends(value) or _adds_to_old(value, old):
        return
    warnings.warn(
        f"The metric's variable {variable.path!r} is given something else than its old value plus "
        "an increment, such as a maximum. Replicas each keep their own state of a metric, and the "
        "states are added up: what this metric shows is not what one process shows. Use a metric "
        "whose states are sums, or compute this one in evaluate on one replica.",
        EquivalenceWarning,
        stacklevel=4,
    )


def _adds_to_old(value: Tensor, old: Tensor | None) -> bool:
    """Whether a value is that of a variable, or the old one, plus something."""
    waiting = [value.op]
    while waiting:
        op = waiting.pop()
        if op.type == "ReadVariableOp" or op is getattr(old, "op", None):
            return True
        if op.type in ("AddV2", "Add", "AddN"):
            waiting.extend(each.op for each in op.inputs)
        elif op.type in _ADDING:
            waiting.append(op.inputs[0].op)
    return False
