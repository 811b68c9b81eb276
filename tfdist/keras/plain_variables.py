"""Variables of TensorFlow's own (`tf.Variable`) that a program assigns within a Keras step.

TensorFlow keeps a copy of such a variable on each replica, and each copy would get the value that
the replica's own examples give. A value is exchanged as it is assigned, so that a later read has
that of the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._tf.variables import MirroredVariable
from tfdist.comm.batch_dependence import is_symbolic
from tfdist.config.gradient_options import PLAIN
from tfdist.errors import EquivalenceWarning
from tfdist.keras.assignments import at_once, check_constants
from tfdist.keras.hooks import Hook, accounted, exchanged
from tfdist.keras.replica_context import Step, current_step
from tfdist.keras.updating import leaves_to_updates
from tfdist.keras.weights import warn_of_own_value
from tfdist.utils.messages import warn

__all__ = ["hooks"]


def hooks() -> list[Hook]:
    """The seam at which a replica assigns its copy of a variable."""
    return [Hook(MirroredVariable, "_update_replica", _exchanged_first)]


def _exchanged_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a variable gets a value of the whole batch, not of its own replica's examples."""

    @functools.wraps(original)
    def update(self: Any, update_fn: Callable[..., Any], value: Any, **kwargs: object) -> object:
        step = current_step()
        if (
            exchanged.is_up
            or accounted.is_up
            or tf.distribute.get_strategy().num_replicas_in_sync == 1
        ):
            return original(self, update_fn, value, **kwargs)
        if step is None or leaves_to_updates(step.model):
            _warn_of_loop(self, value)
            return original(self, update_fn, value, **kwargs)
        # TensorFlow's own aggregation would add up, or average, what is the same on all replicas.
        whole = _of_one_device(step, self.name, value)
        return update_fn(self._get_on_device_or_primary(), whole, **kwargs)

    return update


def _warn_of_loop(variable: Any, value: object) -> None:
    rule = getattr(tf.distribute.get_strategy(), "rule", PLAIN)
    if rule.is_plain and variable.aggregation is tf.VariableAggregation.NONE and is_symbolic(value):
        warn_of_own_value(f"the variable {variable.name!r}", value)


def _of_one_device(step: Step, name: str, value: Any) -> Any:
    step = step.beside_gathered()
    if not getattr(tf.compat.v1.get_default_graph(), "is_control_flow_graph", False):
        subject = f"The variable {name!r}"
        check_constants(step, value, subject)
        return at_once(step, value, subject)
    if is_symbolic(value) and step.depends(value):
        warn(
            f"Within a condition or a loop the step gives the variable {name!r} a value that "
            f"depends on the examples of the batch. Each of the {step.replicas} replicas keeps "
            "that of its own examples. Assign it outside of the condition.",
            EquivalenceWarning,
        )
    return value
