"""Train steps that change gradients before they apply them, as by `tf.clip_by_global_norm`.

Gradients are exchanged when an optimizer applies them. A norm that a `train_step` takes before that
would be a replica's own. Whether a step changes gradients shows when it is traced: `apply` is then
given other tensors than the tape returned. Such a step is traced once more, and its gradients are
exchanged as soon as the tape returns them; from there on everything is as on one device.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from tfdist.config.gradient_options import PLAIN
from tfdist.errors import ConfigError, EquivalenceWarning
from tfdist.keras.replica_context import Step
from tfdist.types import Model, Tensor
from tfdist.utils.messages import warn

__all__ = ["check_moved", "check_unchanged", "is_known", "mark_known", "step_changes_gradients"]

#: Models with a `train_step` of their own, and whether it changes gradients.
_changes: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def is_known(model: Model) -> bool:
    """Whether a model's `train_step` has been traced, so that it is known what it does."""
    return model in _changes


def mark_known(model: Model) -> None:
    """Notes that a model's `train_step` has been traced as a whole."""
    _changes.setdefault(model, False)


def step_changes_gradients(model: Model) -> bool:
    """Whether a model's `train_step` changes gradients, as far as is known."""
    return _changes.get(model, False)


def check_unchanged(step: Step, grads: list[Any]) -> None:
    """Notes it if a step applies gradients that are not those that a tape has returned.

    Args:
        step: the step.
        grads: gradients that an optimizer is to apply before any exchange.

    Raises:
        ConfigError: if that has become known too late.
    """
    present = [g for g in grads if g is not None]
    if tf.executing_eagerly() or all(id(g) in step.gradients for g in present):
        return
    if not step.gradients:
        return  # No tape has computed them.
    _exchange_at_tape(step.model, "changes gradients before it applies them")


def check_moved(step: Step) -> None:
    """Notes it if a step goes on with weights that it has moved by gradients of its own.

    The second gradient of sharpness-aware minimization would be at other weights on each replica,
    and so would a loss by which a step of the descent is taken back.

    Args:
        step: the step, which reads weights or computes gradients.

    Raises:
        ConfigError: if that has become known too late.
    """
    if step.is_whole or step.exchanges_at_tape:
        return
    for weight, value in step.assigned.values():
        traced = weight.trainable and tf.is_symbolic_tensor(value)
        if traced and _is_computed_from(value, step.gradients):
            what = f"moves the weight {weight.path!r} by gradients and then uses it"
            _exchange_at_tape(step.model, what)


def _is_computed_from(tensor: Tensor, sources: dict[int, Any]) -> bool:
    seen: set[int] = set()
    waiting = [tensor]
    while waiting:
        each = waiting.pop()
        if id(each) in sources:
            return True
        if id(each) not in seen:
            seen.add(id(each))
            waiting.extend(each.op.inputs)
    return False


def _exchange_at_tape(model: Model, what: str) -> None:
    """Notes that a model's gradients are to be exchanged where a tape returns them."""
    rule = getattr(tf.distribute.get_strategy(), "rule", PLAIN)
    if not rule.is_exact:
        warn(
            f"The train_step of {type(model).__name__} {what}. With the update rule "
            f"{rule.in_words!r} each replica does so with its own gradients, which are exchanged "
            "afterwards. Train without that rule; to clip what is applied, use the optimizer's "
            "clipnorm, global_clipnorm or clipvalue.",
            EquivalenceWarning,
        )
        return
    if is_known(model) and not _changes[model]:
        raise ConfigError(
            f"The train_step of {type(model).__name__} {what}, and did not when it was traced "
            "first. Make a new model for such a train_step."
        )
    _changes[model] = True
