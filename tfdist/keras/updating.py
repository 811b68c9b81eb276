"""Update modes under Keras: `apply` of optimizers by the strategy's rule, and the flushes of `fit`.

Pending updates are applied before the weights are read: before an evaluation, a prediction
or a checkpoint, and at the end of `fit`. An update of fewer batches than are accumulated is made at
the end of an epoch, as a large batch may be smaller there. Weights that differ from replica to
replica are averaged at the end of an epoch too, so that callbacks see one model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import types
from tfdist._keras import BaseOptimizer, CallbackList, TensorFlowTrainer, Trainer, unwrapped
from tfdist.comm.halves import as_of_halves, is_of_halves
from tfdist.config.gradient_options import PLAIN
from tfdist.errors import ConfigError
from tfdist.gradients.optimizer_state import Updater, optimizers_by_rule, updater_of
from tfdist.gradients.step_profiler import current_marks, stamp
from tfdist.keras.building import build_optimizer
from tfdist.keras.hooks import Hook, exchanged
from tfdist.keras.learning_rate import learning_rate_times
from tfdist.keras.model_optimizers import optimizers_of
from tfdist.keras.replica_context import current_step, weighed
from tfdist.types import Gradient, KerasVariable, Logs, Model, Optimizer
from tfdist.utils.messages import logger
from tfdist.utils.thread_state import Flag

__all__ = ["flush", "hooks", "leaves_to_updates", "step_by_rule"]

#: Set while gradients are applied that have been clipped already.
_clipped = Flag()


def hooks() -> list[Hook]:
    """The seams at which Keras looks at weights, takes and builds optimizers, and clips."""
    return [
        Hook(TensorFlowTrainer, "evaluate", _flush_first),
        Hook(TensorFlowTrainer, "predict", _flush_first),
        Hook(Trainer, "compile", _flush_before, priority=-1),
        Hook(CallbackList, "on_epoch_end", _flush_at_epoch_end, priority=2),
        Hook(CallbackList, "on_train_end", _flush_at_end, priority=2),
        Hook(CallbackList, "on_train_batch_end", _say_rate, priority=1),
        Hook(BaseOptimizer, "build", _with_updater),
        Hook(BaseOptimizer, "_clip_gradients", _unless_clipped),
    ]


def step_by_rule(
    updater: Updater,
    optimizer: Optimizer,
    grads: list[Any],
    weights: Sequence[KerasVariable] | None,
) -> None:
    """Hands a batch's gradients to the updater, in a replica context.

    Args:
        updater: the optimizer's.
        optimizer: the optimizer; built if it is not.
        grads: one dense tensor, `IndexedSlices` or None for each weight.
        weights: Keras's variables; None if the optimizer is built.

    Raises:
        ConfigError: if the optimizer scales its loss and the rule keeps gradients.
    """
    _check(updater, optimizer)
    weights = _built(optimizer, weights)
    here = [i for i, grad in enumerate(grads) if grad is not None]
    if not here:
        return
    present = [grads[i] for i in here]
    if updater.rule.clip == "before":
        present = optimizer._clip_gradients(present)
    now = current_step()
    if now is None:
        shares: tuple[Any, Any] = (1, tf.distribute.get_strategy().num_replicas_in_sync)
    else:
        shares = (now.count, now.total)
        owned = {id(weight) for weight in now.model.weights}
        updater.changed.update({k: v._value for k, (v, _) in now.assigned.items() if k in owned})
    updater.rate.note_batch(None if now is None else now.total)

    halves = [is_of_halves(grad) for grad in present]  # A rule with a memory has no loss scale.

    def apply_all(sums: list[Any]) -> None:
        pairs = zip(sums, halves, strict=True)
        sums = [as_of_halves(total) if of_halves else total for total, of_halves in pairs]
        supply = dict(zip(here, sums, strict=True))
        _apply(optimizer, updater, [supply.get(i) for i in range(len(grads))], weights)

    marks = current_marks()
    if marks is not None:
        marks.computed = stamp(present)
    places = tuple(unwrapped(optimizer)._get_variable_index(weights[i]) for i in here)
    values = [weights[i].value for i in here]
    cost = updater.step(places, values, weighed(present, optimizer), shares, apply_all)
    if marks is not None:
        marks.exchanges.append(cost)


def _apply(optimizer: Optimizer, updater: Updater, grads: list[Any], weights: list[Any]) -> None:
    """Applies gradients that have been exchanged, by Keras's own `apply`."""
    factor = updater.rate.factor(optimizer.iterations)
    clips = updater.rule.clip == "after"
    with exchanged.up(), learning_rate_times(factor):
        if clips:
            optimizer.apply(grads, weights)
        else:
            with _clipped.up():
                optimizer.apply(grads, weights)


def _check(updater: Updater, optimizer: Optimizer) -> None:
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales and updater.rule.remembers:
        raise ConfigError(
            f"The update rule {updater.rule.described!r} keeps gradients from step to step, which "
            "conflicts with LossScaleOptimizer, whose scale changes meanwhile. Leave "
            "LossScaleOptimizer out; or, if the policy 'mixed_float16' brings it, use "
            "'mixed_bfloat16', which needs no scale."
        )


def _built(optimizer: Optimizer, weights: Sequence[KerasVariable] | None) -> list[Any]:
    if weights is None:
        return list(unwrapped(optimizer)._trainable_variables)
    given: list[Any] = list(weights)
    build_optimizer(optimizer, given)
    return given


def leaves_to_updates(model: Model) -> bool:
    """Whether replicas change a model's layer weights by themselves between two averages."""
    return any(updater.rule.periodic for _, updater in _updaters(model))


def flush(model: Model | None, *, batches: bool, late: bool = True) -> None:
    """Applies the pending updates of a model's optimizers. Must be called by all workers.

    Args:
        model: the model; anything without optimizers has nothing pending.
        batches: also make an update of fewer batches than are accumulated.
        late: apply gradients that wait too; weights that differ are averaged in any case.
    """
    if not tf.distribute.in_cross_replica_context():
        return
    for optimizer, updater in _updaters(model):
        apply = functools.partial(_apply_flushed, optimizer, updater)
        updater.flush(apply, batches=batches, late=late or updater.rule.periodic)


def _apply_flushed(
    optimizer: Optimizer, updater: Updater, places: tuple[int, ...], grads: list[Any]
) -> None:
    _apply(optimizer, updater, grads, [optimizer._trainable_variables[index] for index in places])


def _updaters(model: Model | None) -> list[tuple[Any, Updater]]:
    """The optimizers of a model and their updaters.

    A loop of the program's own may have an optimizer that the model does not know. It belongs to a
    model if it updates one of its weights.
    """
    strategy = tf.distribute.get_strategy()
    if model is None or getattr(strategy, "rule", PLAIN).is_plain:
        return []
    weights = {id(weight) for weight in getattr(model, "weights", ())}
    others = [
        optimizer
        for optimizer in optimizers_by_rule(strategy)
        if any(id(each) in weights for each in unwrapped(optimizer)._trainable_variables)
    ]
    optimizers = {id(each): each for each in [*optimizers_of(model), *others]}
    pairs = ((optimizer, updater_of(optimizer, strategy)) for optimizer in optimizers.values())
    return [(optimizer, updater) for optimizer, updater in pairs if updater is not None]


def _flush_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Applies pending updates; all of them if `fit` evaluates at the end of an epoch."""

    @functools.wraps(original)
    def look(self: Model, *args: object, **kwargs: object) -> object:
        flush(self, batches=bool(kwargs.get("_use_cached_eval_dataset")))
        return original(self, *args, **kwargs)

    return look


def _flush_before(original: Callable[..., None]) -> Callable[..., None]:
    """A new optimizer begins with all updates of the old one, and with the same weights."""

    @functools.wraps(original)
    def compile_model(self: Model, *args: object, **kwargs: object) -> None:
        flush(self, batches=True)
        original(self, *args, **kwargs)

    return compile_model


def _flush_at_epoch_end(original: Callable[..., None]) -> Callable[..., None]:
    """Callbacks see the weights of all steps of the epoch."""

    @functools.wraps(original)
    def on_epoch_end(self: types.CallbackList, epoch: int, logs: Logs | None = None) -> None:
        flush(getattr(self, "_model", None), batches=True, late=False)
        original(self, epoch, logs)

    return on_epoch_end


def _flush_at_end(original: Callable[..., None]) -> Callable[..., None]:
    """The weights at the end of `fit` are those of all steps."""

    @functools.wraps(original)
    def on_train_end(self: types.CallbackList, logs: Logs | None = None) -> None:
        flush(getattr(self, "_model", None), batches=True)
        original(self, logs)

    return on_train_end


def _say_rate(original: Callable[..., None]) -> Callable[..., None]:
    """Shows once, when the size of a batch is known, the factor of the learning rate."""

    @functools.wraps(original)
    def on_train_batch_end(self: types.CallbackList, *args: object, **kwargs: object) -> None:
        rule = getattr(tf.distribute.get_strategy(), "rule", None)
        if rule is not None and rule.lr_rule != "none":
            for _, updater in _updaters(getattr(self, "_model", None)):
                text = updater.rate.notice()
                if text:
                    _say(text)
        original(self, *args, **kwargs)

    return on_train_batch_end


def _with_updater(original: Callable[..., None]) -> Callable[..., None]:
    """Gives an optimizer its updater when it is built, so that a checkpoint finds it."""

    @functools.wraps(original)
    def build(self: Optimizer, variables: Sequence[KerasVariable]) -> None:
        original(self, variables)
        updater_of(self, tf.distribute.get_strategy())

    return build


def _unless_clipped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replicas that train by themselves have clipped their own gradients already."""

    @functools.wraps(original)
    def clip_gradients(self: Optimizer, grads: Sequence[Gradient]) -> Sequence[Gradient]:
        return grads if _clipped.is_up else original(self, grads)

    return clip_gradients


def _say(text: str) -> None:
    """Shows a text to the user, on the chief."""
    if getattr(tf.distribute.get_strategy(), "is_chief", True):
        logger.info(text)
