"""Updates of metrics inside a Keras step: replicas' states are added up when they are read.

That is exact for states to which each example adds its own. A number that a metric adds for each
batch, such as 1 or a mean over the batch, must be the whole batch's, and be added once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._keras import reduction_metrics
from tfdist._tf.graphs import constant_of
from tfdist.comm.batch_dependence import Dependence, is_symbolic
from tfdist.errors import EquivalenceWarning
from tfdist.keras.batch_axes import CHOOSING, batch_axis
from tfdist.keras.gathered_loss import noted_call, of_whole_batch
from tfdist.keras.hooks import Hook, is_of_program
from tfdist.keras.logs import single_metrics
from tfdist.keras.open_batch import SIZE_ADVICE, SIZE_NEEDED
from tfdist.keras.reductions import Reduction, is_by_feature, reduction_of
from tfdist.keras.replica_context import Step, current_step
from tfdist.keras.whole_batch import check_given, check_kept, computed_again, over_whole_batch
from tfdist.keras.whole_statistics import average_of, with_whole_statistics
from tfdist.types import Graph, KerasVariable, Metric, Structure, Tensor
from tfdist.utils.messages import warn
from tfdist.utils.thread_state import Flag

__all__ = ["STATE", "hooks", "of_replica"]

#: The name of tensors that stand for a metric's variables, if they are kept elsewhere.
STATE = "tfdist_metric"

#: Set while Keras's own mean or sum adds numbers up, which have been weighed before.
_weighed = Flag()

#: Ops through which a variable's old value passes as it is.
_PASSING = frozenset({"Identity", "StopGradient", "EnsureShape"})
#: Ops by which something is added to their first input, or to any of them.
_ADDING = frozenset(
    {"Sub", "TensorScatterAdd", "TensorScatterSub", "Cast", "StridedSlice", "Reshape", *_PASSING}
)
_SUMS = frozenset({"AddV2", "Add", "AddN"})


def hooks() -> list[Hook]:
    """The seams of Keras's means and sums, and of its metrics that are functions."""
    return [
        Hook(reduction_metrics.Mean, "update_state", _weigh_scalars),
        Hook(reduction_metrics.Sum, "update_state", _weigh_scalars_of_sum),
        Hook(reduction_metrics.MeanMetricWrapper, "update_state", _noted_as_call),
    ]


def _noted_as_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes the function of a metric: of some, such as R2, a batch's mean is not one over parts."""

    @functools.wraps(original)
    def update_state(
        self: Any, y_true: Structure, y_pred: Structure, sample_weight: Structure = None
    ) -> object:
        step = current_step()
        if step is None:
            return original(self, y_true, y_pred, sample_weight)
        compute = functools.partial(self._fn, **self._fn_kwargs)
        with noted_call(step, compute, None, (y_true, y_pred)):
            return original(self, y_true, y_pred, sample_weight)

    return update_state


def _weigh_scalars(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a scalar that a replica tracks count by the replica's share of the batch.

    `self.loss_tracker.update_state(loss)` of a custom `train_step` then has the value it has on one
    device: the mean over the steps of each global batch's mean.
    """

    @functools.wraps(original)
    def update_state(self: Metric, values: Tensor, sample_weight: Tensor | None = None) -> object:
        step = current_step()
        if step is None:
            return original(self, values, sample_weight)
        values, _ = of_whole_batch(step, keras.ops.convert_to_tensor(values), None)
        if is_by_feature(values, step.depends, step.averages()) and not len(
            getattr(sample_weight, "shape", ())
        ):
            values = tf.reduce_mean(values)  # Each batch has as many, so that they count alike.
        values, sample_weight = (_of_rows(step, self, x) for x in (values, sample_weight))
        if values.shape.rank == 0 and not len(getattr(sample_weight, "shape", ())):
            values = average_of(step, values, _value_of(self))
            if not step.even and not _is_of_batch(step, sample_weight):
                weight = 1 if sample_weight is None else tf.cast(sample_weight, self.dtype)
                sample_weight = weight * step.share(self.dtype) * step.replicas
        with _weighed.up():
            return original(self, values, sample_weight)

    return update_state


def _is_of_batch(step: Step, sample_weight: Any) -> bool:
    """Whether a weight comes from the batch, such as its size: it is the replica's own then.

    A graph shows that. A step that runs eagerly does not: there the batch's size is an integer, and
    a weight of another type counts as a constant unless it is a tensor.
    """
    if is_symbolic(sample_weight):
        return step.depends(sample_weight)
    if not tf.executing_eagerly():
        return False
    return isinstance(sample_weight, int | np.integer | tf.Tensor)


def _weigh_scalars_of_sum(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the scalars that replicas add up be parts of the whole batch's."""

    @functools.wraps(original)
    def update_state(self: Metric, values: Tensor, sample_weight: Tensor | None = None) -> object:
        step = current_step()
        values = values if step is None else keras.ops.convert_to_tensor(values)
        if step is None or sample_weight is not None or values.shape.rank != 0:
            return original(self, values, sample_weight)
        values = _of_rows(step, self, values)
        with _weighed.up():
            whole = average_of(step, values, _value_of(self))
            return original(self, step.weigh(tf.cast(whole, self.dtype)))

    return update_state


def _value_of(metric: Metric) -> str:
    return f"A value of the metric {metric.name!r}"


def _of_rows(step: Step, metric: Metric, value: object) -> Any:
    """A number as a floating-point one, and rows with the statistics of the whole batch in them."""
    if step.is_whole or not is_symbolic(value) or not step.depends(value):
        return value
    check_kept(step, value)
    if value.shape.rank == 0:
        return tf.cast(value, metric.dtype)
    again = with_whole_statistics(step, value)
    check_given(step, again)
    return again


def of_replica(
    step: Step | None, variable: KerasVariable, value: Tensor, old: Tensor | None
) -> Tensor:
    """The value of a metric's variable on this replica; those of all replicas are added up.

    Args:
        step: the calling replica's step; None if there is one replica.
        variable: the metric's Keras variable.
        value: the value that the metric gives it.
        old: its present value, if that is not a variable's value.

    Returns:
        `value` itself if what is added to the old value adds up, too.
    """
    if not is_symbolic(value):
        return value
    depends = Dependence() if step is None else step.depends
    if not _adds_to_old(value, old):
        if depends(value):
            _warn_of_replaced(variable)
        return value
    if _weighed.is_up or (step is None and old is None):
        return value
    summands = _summands(value, old)
    if summands is None:
        return value
    base, terms = summands
    if step is None or step.is_whole:
        if any(_reads_states(term, {}) for term, _ in terms):
            _warn_of_state(variable)
        return value
    owner = _owner_of(step, variable)
    known = step.held | step.outputs
    if is_of_program(type(owner)) and any(_reads_states(each, known, owner) for each, _ in terms):
        _warn_of_state(variable)
    own = [_of_replica(step, variable, term) for term, _ in terms]
    if all(new is term for new, (term, _) in zip(own, terms, strict=True)):
        return value
    for new, (_, sign) in zip(own, terms, strict=True):
        base = base + new if sign > 0 else base - new
    return base


def _of_replica(step: Step, variable: KerasVariable, term: Tensor) -> Tensor:
    """A replica's part of what one device adds to a variable for a batch."""
    if not step.depends(term):
        return term if _counts_examples(step, variable, term) else step.added_once(term)
    check_kept(step, term)
    if batch_axis(term, step.depends) is not None:
        return term
    again = with_whole_statistics(step, term)
    if not step.depends(again):
        return step.added_once(again)
    found = reduction_of(again, step.depends, step.averages())
    if found.unknown:
        of_program = is_of_program(type(_owner_of(step, variable)))
        hidden = found.unknown if of_program else found.unknown & CHOOSING
        if hidden:
            _warn_of_hidden(variable, hidden)
        return again
    if found.linear and all(leaf.is_sum for leaf in found.leaves) and not _is_offset(step, found):
        return again
    if again is term and found.is_mean:
        return step.weigh(term)
    return step.added_once(computed_again(again, found, over_whole_batch(step, found.leaves)))


def _counts_examples(step: Step, variable: KerasVariable, term: Tensor) -> bool:
    """Whether a constant is a number of examples, which graphs with a static size do not show.

    A constant is taken for one if it is a multiple of a replica's number of examples. A metric of
    the program's own may mean something else by it, so that is a warning.
    """
    if step.size is None or not step.is_static:
        return False
    constant = constant_of(term)
    if constant is None or not np.any(constant):
        return False
    owner = _owner_of(step, variable)
    # Keras's own count examples, but for a sum, which adds up what the program gives it.
    of_sum = step.size == 1 and type(owner) is keras.metrics.Sum
    is_multiple = not np.any(constant % step.size)
    if (is_of_program(type(owner)) or of_sum) and (is_multiple or np.any(constant != 1)):
        _warn_of_constant(step, variable, is_multiple)
    return is_multiple


def _owner_of(step: Step, variable: KerasVariable) -> Metric | None:
    """The metric of the model that a variable belongs to; None if the model does not have it."""
    owners = (m for m in single_metrics(step.model) if any(v is variable for v in m.variables))
    return next(owners, None)


def _is_offset(step: Step, found: Reduction) -> bool:
    """Whether something that does not depend on the batch is added to what does."""
    return any(
        op.type in (*_SUMS, "Sub") and not all(step.depends(x) for x in op.inputs)
        for op in found.between
    )


def _summands(value: Tensor, old: Tensor | None) -> tuple[Tensor, list[tuple[Tensor, int]]] | None:
    """A variable's old value, and what is added to it, each with its sign; None if not known."""
    terms: list[tuple[Tensor, int]] = []
    while not _is_old(value, old):
        op = value.op
        if op.type in _SUMS:
            kept = [x for x in op.inputs if _adds_to_old(x, old)]
            if len(kept) != 1:
                return None
            terms += [(x, 1) for x in op.inputs if x is not kept[0]]
            value = kept[0]
        elif op.type == "Sub":
            terms.append((op.inputs[1], -1))
            value = op.inputs[0]
        elif op.type in _PASSING:
            value = op.inputs[0]
        else:
            return None
    return value, terms


def _reads_states(term: Tensor, known: Mapping[int, object], owner: Metric | None = None) -> bool:
    """Whether a metric's variables are read between known tensors, by `id`, and a tensor."""
    states = _handles(term.op.graph, owner)
    waiting, seen = [term], set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen or id(tensor) in known:
            continue
        seen.add(id(tensor))
        op = tensor.op
        if op.name.rpartition("/")[2].startswith(STATE):
            return True
        if op.type == "ReadVariableOp" and id(op.inputs[0]) in states:
            return True
        waiting.extend(op.inputs)
    return False


def _handles(graph: Graph, owner: Metric | None) -> set[int]:
    """The `id`s of tensors of a graph that are handles of a metric's variables."""
    variables = [variable._value for variable in getattr(owner, "variables", ())]
    parts = [part for each in variables for part in getattr(each, "values", [each])]
    outer = {id(part.handle) for part in parts}
    return {id(inner) for each, inner in getattr(graph, "captures", ()) if id(each) in outer}


def _is_old(value: Tensor, old: Tensor | None) -> bool:
    return value.op.type == "ReadVariableOp" or value.op is getattr(old, "op", None)


def _adds_to_old(value: Tensor, old: Tensor | None) -> bool:
    """Whether a value is that of a variable, or the old one, plus something."""
    waiting, seen = [value], set()
    while waiting:
        tensor = waiting.pop()
        if _is_old(tensor, old):
            return True
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if tensor.op.type in _SUMS:
            waiting.extend(tensor.op.inputs)
        elif tensor.op.type in _ADDING:
            waiting.append(tensor.op.inputs[0])
    return False


def _warn_of_replaced(variable: KerasVariable) -> None:
    warn(
        f"The metric's variable {variable.path!r} is given something else than its old value plus "
        "an increment, such as a maximum. Replicas each keep their own state of a metric, and the "
        "states are added up: what this metric shows is not what one process shows. Use a metric "
        "whose states are sums, or compute this one in evaluate on one replica.",
        EquivalenceWarning,
    )


def _warn_of_state(variable: KerasVariable) -> None:
    warn(
        f"To the metric's variable {variable.path!r} is added what is computed from the metric's "
        "state, as in a running variance. Replicas each keep their own state of a metric, and the "
        "states are added up: what this metric shows is not what one process shows. Add up sums "
        "over the examples, such as those of values and of their squares, and compute the rest in "
        "result().",
        EquivalenceWarning,
    )


def _warn_of_hidden(variable: KerasVariable, found: set[str]) -> None:
    warn(
        f"To the metric's variable {variable.path!r} is added what "
        f"{', '.join(sorted(found))} computes from the examples, which is not a mean or sum of "
        "them as far as tfdist can tell, such as a batch's maximum. Each replica has examples of "
        "its own, and the replicas' numbers are "
        "added up: if the number is not a sum over the examples, this metric does not show what "
        "one process shows. Use a metric whose "
        "states are sums over the examples, or compute this one in evaluate on one replica.",
        EquivalenceWarning,
    )


def _warn_of_constant(step: Step, variable: KerasVariable, is_multiple: bool) -> None:
    taken = "a number of examples, and added up over" if is_multiple else "one number for all of"
    warn(
        f"To the metric's variable {variable.path!r} is added a constant, and {SIZE_NEEDED}. So "
        "tfdist cannot tell whether it belongs to the batch or to its examples. It is taken for "
        f"{taken} the {step.replicas} replicas. {SIZE_ADVICE}, or leave drop_remainder out.",
        EquivalenceWarning,
    )
