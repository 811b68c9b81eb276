"""Variables of TensorFlow's own (`tf.Variable`) that a program assigns within a Keras step.

TensorFlow keeps a copy of such a variable on each replica, and each copy would get the value that
the replica's own examples give. A value is exchanged as it is assigned, so that a later read has
that of the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from tfdist._tf.variables import MirroredVariable, ResourceVariable, replicated
from tfdist.comm.batch_dependence import is_symbolic
from tfdist.comm.replica_collectives import is_sparse
from tfdist.config.gradient_options import PLAIN
from tfdist.errors import ConfigError, EquivalenceWarning
from tfdist.keras.assignments import at_once, check_constants, holds_examples
from tfdist.keras.example_pairs import place_of
from tfdist.keras.hooks import Hook, accounted, exchanged
from tfdist.keras.replica_context import Step, current_step
from tfdist.keras.updating import leaves_to_updates
from tfdist.keras.weights import warn_of_own_value
from tfdist.types import IndexedSlices
from tfdist.utils.messages import warn

__all__ = ["hooks"]


def hooks() -> list[Hook]:
    """The seams at which a replica assigns its copy of a variable."""
    return [
        Hook(MirroredVariable, "_update_replica", _exchanged_first),
        Hook(ResourceVariable, "_strided_slice_assign", _exchanged_slice),
    ]


def _exchanged_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a variable gets a value of the whole batch, not of its own replica's examples."""

    @functools.wraps(original)
    def update(self: Any, update_fn: Callable[..., Any], value: Any, **kwargs: object) -> object:
        step = current_step()
        if _is_settled():
            return original(self, update_fn, value, **kwargs)
        if step is None or leaves_to_updates(step.model):
            _warn_of_loop(self, value)
            return original(self, update_fn, value, **kwargs)
        # TensorFlow's own aggregation would add up, or average, what is the same on all replicas.
        whole = _of_one_device(step, self.name, value)
        return update_fn(self._get_on_device_or_primary(), whole, **kwargs)

    return update


def _exchanged_slice(original: Callable[..., Any]) -> Callable[..., Any]:
    """A slice of a copy, as in `variable[:n].assign(value)`, gets a value of the whole batch."""

    @functools.wraps(original)
    def assign(
        self: Any, begin: Any, end: Any, strides: Any, value: Any, *args: Any, **kwargs: Any
    ) -> object:
        step, variable = current_step(), replicated(self)
        if step is None or variable is None or _is_settled() or leaves_to_updates(step.model):
            return original(self, begin, end, strides, value, *args, **kwargs)
        value = _of_one_device(step, variable.name, value)
        if any(is_symbolic(each) and step.depends(each) for each in (begin, end, strides)):
            _refuse_places(step, variable.name)
        return original(self, begin, end, strides, value, *args, **kwargs)

    return assign


def _is_settled() -> bool:
    """Whether a value that is assigned is that of the whole batch already."""
    alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
    return exchanged.is_up or accounted.is_up or alone


def _slices_of_one_device(step: Step, name: str, slices: IndexedSlices) -> IndexedSlices:
    """The rows that one device writes into some rows of a variable: those of all examples."""
    rows = [slices.values, slices.indices]
    if step.is_whole or not any(is_symbolic(x) and step.depends(x) for x in rows):
        return slices
    if not is_symbolic(slices.indices) or not step.depends(slices.indices):
        values = _of_one_device(step, name, slices.values)
        return tf.IndexedSlices(values, slices.indices, slices.dense_shape)
    if not holds_examples(step, slices.indices):
        _refuse_places(step, name)
    (values, indices), _ = step.gather(rows, place_of(slices.indices.op))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _refuse_places(step: Step, name: str) -> NoReturn:
    raise ConfigError(
        f"The variable {name!r} is changed in place (scatter_update, variable[:n].assign), at "
        f"elements that depend on the examples of the batch. Each of the {step.replicas} replicas "
        "has examples of its own and would change others. Gather the examples first "
        "(tf.distribute.get_replica_context().all_gather(rows, axis=0)), or train on one replica."
    )


def _warn_of_loop(variable: Any, value: object) -> None:
    rule = getattr(tf.distribute.get_strategy(), "rule", PLAIN)
    if rule.is_plain and variable.aggregation is tf.VariableAggregation.NONE and is_symbolic(value):
        warn_of_own_value(f"the variable {variable.name!r}", value)


def _of_one_device(step: Step, name: str, value: Any) -> Any:
    step = step.beside_gathered()
    parts = [value.values, value.indices] if is_sparse(value) else [value]
    if not getattr(tf.compat.v1.get_default_graph(), "is_control_flow_graph", False):
        if is_sparse(value):
            return _slices_of_one_device(step, name, value)
        subject = f"The variable {name!r}"
        check_constants(step, value, subject)
        return at_once(step, value, subject)
    if any(is_symbolic(each) and step.depends(each) for each in parts):
        warn(
            f"Within a condition or a loop the step gives the variable {name!r} a value that "
            f"depends on the examples of the batch. Each of the {step.replicas} replicas keeps "
            "that of its own examples. Assign it outside of the condition.",
            EquivalenceWarning,
        )
    return value
