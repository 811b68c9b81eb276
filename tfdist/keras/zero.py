"""ZeRO: each process keeps and updates its shard of the optimizer's state (arXiv:1910.02054).

Stage 1 divides the optimizer's variables; stage 2 also the gradients, of which a process is sent
the sum of its shard only. After the update each process has the new values of its shards, and the
whole weights are gathered from them. Keras's own optimizers compute the update, to which each
weight is its shard meanwhile (`tfdist.sharding.variables.as_shards`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import types
from tfdist._keras import BaseOptimizer, LossScaleOptimizer
from tfdist.comm.replica_collectives import is_sparse
from tfdist.errors import ConfigError
from tfdist.keras.building import build_optimizer
from tfdist.keras.hooks import Hook, exchanged
from tfdist.keras.replica_context import Step, current_step, weighed
from tfdist.sharding.exchange import gather, own_shard, reduce_scatter
from tfdist.sharding.layout import Layout, layout_for
from tfdist.sharding.variables import (
    ShardedVariable,
    WholeWeight,
    as_shards,
    divide,
)
from tfdist.types import Gradient, KerasVariable, Optimizer, Strategy, Tensor
from tfdist.utils.thread_state import Current

__all__ = [
    "apply_reduced",
    "hooks",
    "note_shards",
    "only_for_optimizers",
    "reduce_to_shards",
    "stage",
]

#: Keras's optimizers whose update of an element depends on that element alone.
_ELEMENTWISE = (
    *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion"),
)

#: Whether each of the gradients that are applied is a shard.
_are_shards: Current[Sequence[bool]] = Current(())


def hooks() -> list[Hook]:
    """The seams at which optimizers make their variables and look at all gradients."""
    return [
        Hook(BaseOptimizer, "build", _divided, priority=1),
        Hook(BaseOptimizer, "_clip_gradients", _clip_shards, priority=1),
        Hook(LossScaleOptimizer, "check_finite", _agree_on_finite),
    ]


def stage(strategy: types.AnyStrategy) -> int:
    """The stage of ZeRO of a strategy; 0 if nothing is divided."""
    return int(getattr(strategy, "zero", 0))


def note_shards(step: Step, weights: Sequence[Any], grads: Sequence[Gradient | None]) -> None:
    """Notes which gradients that a tape has returned are shards.

    Args:
        step: the step.
        weights: the sources whose gradients the tape was asked for.
        grads: the gradient of each.
    """
    for weight, grad in zip(weights, grads, strict=True):
        if grad is not None and isinstance(weight, ShardedVariable):
            step.shards.note(grad)


@contextlib.contextmanager
def only_for_optimizers(step: Step) -> Iterator[None]:
    """A block that runs a `train_step`; what reads its shards of gradients is an optimizer.

    Raises:
        ConfigError: if the step reads one itself.
    """
    try:
        yield
    except Exception as error:
        _check_reads(step, error)
        raise
    _check_reads(step)


def _check_reads(step: Step, failure: Exception | None = None) -> None:
    if step.shards.read_by_program():
        raise ConfigError(
            f"zero=3 conflicts with the train_step of {type(step.model).__name__}, which reads or "
            "changes gradients itself: a process has shards of them only, so that a norm, for one, "
            "would be of a part. To clip, use the optimizer's clipnorm, global_clipnorm or "
            "clipvalue; or choose zero=2."
        ) from failure


def reduce_to_shards(
    grads: Sequence[Any], weights: Sequence[Any], optimizer: Optimizer
) -> list[Any]:
    """Averages gradients over the replicas, weighed by examples; of divided weights the own shard.

    Args:
        grads: one dense tensor, `IndexedSlices` or None for each weight.
        weights: Keras's variables.
        optimizer: the optimizer that they are for.
    """
    strategy = tf.distribute.get_strategy()
    own = {i for i, weight in enumerate(weights) if isinstance(weight, ShardedVariable)}
    here = [i for i, grad in enumerate(grads) if grad is not None and i not in own]
    grads = list(grads)
    for i, grad in zip(here, weighed([grads[i] for i in here], optimizer), strict=True):
        grads[i] = grad
    pairs = list(zip(grads, weights, strict=True))
    divided = [
        i
        for i, (grad, weight) in enumerate(pairs)
        if isinstance(weight, WholeWeight) and grad is not None and not is_sparse(grad)
    ]
    layouts = [weights[i].layout for i in divided]
    shards = reduce_scatter(strategy.link(), [grads[i] for i in divided], layouts)
    result: dict[int, Any] = dict(zip(divided, shards, strict=True))
    result.update((i, grads[i]) for i in own)
    rest = [i for i, grad in enumerate(grads) if grad is not None and i not in result]
    sums = strategy.sum_gradients([grads[i] for i in rest]) if rest else []
    result.update((i, _own(each, weights[i])) for i, each in zip(rest, sums, strict=True))
    return [result.get(i) for i in range(len(grads))]


def apply_reduced(
    original: Callable[..., Any],
    optimizer: Optimizer,
    grads: Sequence[Any],
    weights: Sequence[Any] | None,
    *,
    shards: bool = False,
) -> Any:
    """Applies gradients that have been exchanged: each process to its shards, if they are divided.

    Args:
        original: the optimizer's `apply`.
        optimizer: the optimizer; built.
        grads: one dense tensor, `IndexedSlices` or None for each weight.
        weights: Keras's variables; None for those that the optimizer was built with.
        shards: whether gradients of divided weights are shards already.
    """
    strategy = tf.distribute.get_strategy()
    if as_shards.is_up or not stage(strategy):
        with exchanged.up():
            return original(optimizer, grads, weights)
    _check_step(strategy)
    if weights is not None:
        build_optimizer(optimizer, list(weights))
    core = getattr(optimizer, "inner_optimizer", optimizer)
    given = list(core._trainable_variables if weights is None else weights)
    if not shards:
        grads = [_own(each, weight) for each, weight in zip(grads, given, strict=True)]
    divided = [each for each in given if isinstance(each, WholeWeight)]
    for weight in divided:
        weight.refresh()
    present = zip(grads, given, strict=True)
    kinds = (WholeWeight, ShardedVariable)
    flags = [isinstance(each, kinds) for grad, each in present if _is_updated(grad, each)]
    step = current_step()
    reads = contextlib.nullcontext() if step is None else step.shards.to_optimizer()
    with reads, exchanged.up(), as_shards.up(), _are_shards.set(flags), _without_constraints(given):
        original(optimizer, grads, weights)
    wholes = gather(
        strategy.link(),
        [tf.convert_to_tensor(each.shard) for each in divided],
        [each.layout for each in divided],
    )
    for weight, whole in zip(divided, wholes, strict=True):
        weight._value.assign(whole)
    return None


def _check_step(strategy: Strategy) -> None:
    """Refuses steps in which shards cannot be exchanged, or gradients may be changed unseen."""
    if tf.executing_eagerly():
        raise ConfigError(
            f"zero={stage(strategy)} conflicts with a step that runs eagerly (run_eagerly=True, or "
            "a loop outside of tf.function): processes exchange their shards in compiled steps. "
            "Leave run_eagerly out, decorate the step with @tf.function, or leave zero out."
        )
    if stage(strategy) > 2 and current_step() is None:
        raise ConfigError(
            "zero=3 conflicts with a training loop written by hand: what such a loop does with the "
            "gradients, of which a process has its shards, cannot be known. Train with `fit`, "
            "`train_on_batch` or a `train_step`, or choose zero=2."
        )


@contextlib.contextmanager
def _without_constraints(weights: Sequence[Any]) -> Iterator[None]:
    """Constraints are functions of whole weights: they follow after the block."""
    bound = [
        (each, each.constraint)
        for each in weights
        if isinstance(each, ShardedVariable) and each.constraint is not None
    ]
    for weight, _ in bound:
        weight.constraint = None
    try:
        yield
    finally:
        for weight, constraint in bound:
            weight.constraint = constraint
    with as_shards.set(False):
        for weight, constraint in bound:
            weight.assign(constraint(weight.gathered()))


def _is_updated(grad: Gradient | None, weight: Any) -> bool:
    """Whether an optimizer computes an update of a weight, instead of taking over the gradient."""
    return grad is not None and not weight.overwrite_with_gradient


def _own(grad: Gradient | None, weight: Any) -> Gradient | None:
    if grad is None or not isinstance(weight, WholeWeight):
        return grad
    return own_shard(grad, weight.layout)


def _divided(original: Callable[..., None]) -> Callable[..., None]:
    """Gives weights their shards before the optimizer makes its variables like them."""

    @functools.wraps(original)
    def build(self: Optimizer, variables: Sequence[KerasVariable]) -> None:
        strategy = tf.distribute.get_strategy()
        if stage(strategy):
            _check(self, strategy)
            for weight in variables:
                layout = _layout_of(weight, strategy)
                if layout is not None:
                    divide(weight, layout, strategy)
        original(self, variables)

    return build


def _layout_of(weight: Any, strategy: Strategy) -> Layout | None:
    """The layout of a weight that can be divided, and is not yet.

    Constraints and float8 scales are functions of the whole weight.
    """
    whole = weight.constraint is not None or weight.overwrite_with_gradient
    if whole or stage(strategy) > 2 or isinstance(weight, WholeWeight):
        return None
    return layout_for(weight.shape, strategy.shard.workers, strategy.shard.worker)


def _check(optimizer: Optimizer, strategy: Strategy) -> None:
    """Refuses optimizers whose update of a shard needs more than the shard."""
    if isinstance(optimizer, LossScaleOptimizer):
        return
    known = [getattr(keras.optimizers, name) for name in _ELEMENTWISE]
    by = next(each for each in type(optimizer).__mro__ if "update_step" in vars(each))
    if by not in known:
        raise ConfigError(
            f"zero={stage(strategy)} conflicts with the optimizer {type(optimizer).__name__}: each "
            "process updates a part of each weight, which is exact for optimizers that compute "
            f"each element by itself ({', '.join(_ELEMENTWISE)}), and {by.__name__}.update_step is "
            "not known to. Choose one of these, or leave zero out."
        )


def _clip_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Norms are those of whole gradients, of which a process has shards."""

    @functools.wraps(original)
    def clip_gradients(self: Optimizer, grads: Sequence[Gradient]) -> Sequence[Gradient]:
        limit = self.clipnorm or self.global_clipnorm
        if not as_shards.is_up or not limit:
            return original(self, grads)
        squares = _squares(list(grads), _are_shards.value)
        if self.clipnorm:
            return [_within(limit, g, tf.sqrt(s)) for g, s in zip(grads, squares, strict=True)]
        norm = tf.sqrt(tf.add_n([tf.cast(each, tf.float32) for each in squares]))
        return [_within(limit, grad, norm) for grad in grads]

    return clip_gradients


def _squares(grads: list[Any], are_shards: Sequence[bool]) -> list[Tensor]:
    """The squared norm of each whole gradient."""
    squares = [tf.reduce_sum(tf.square(_values(grad))) for grad in grads]
    divided = [i for i, is_shard in enumerate(are_shards) if is_shard]
    if divided:
        own = tf.stack([tf.cast(squares[i], tf.float32) for i in divided])
        sums = tf.unstack(tf.distribute.get_strategy().link().sum([own])[0], len(divided))
        for i, total in zip(divided, sums, strict=True):
            squares[i] = total
    return squares


def _values(grad: Gradient) -> Tensor:
    return grad.values if is_sparse(grad) else grad


def _within(limit: float, grad: Gradient, norm: Tensor) -> Gradient:
    """A gradient scaled to a norm that is not above a limit; NaN if the norm is not finite."""
    factor = tf.cast(limit / tf.maximum(norm, limit) + (norm - norm), grad.dtype)
    if is_sparse(grad):
        return tf.IndexedSlices(grad.values * factor, grad.indices, grad.dense_shape)
    return grad * factor


def _agree_on_finite(original: Callable[..., Any]) -> Callable[..., Any]:
    """A step is skipped by all processes if one of them has an infinity in its shards."""

    @functools.wraps(original)
    def check_finite(self: Optimizer, grads: Sequence[Gradient]) -> Tensor:
        finite = original(self, grads)
        if not as_shards.is_up:
            return finite
        bad = tf.cast(tf.logical_not(finite), tf.float32)
        return tf.distribute.get_strategy().link().sum([bad])[0] < 0.5

    return check_finite
