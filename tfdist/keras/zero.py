"""Optimizers of divided weights: ZeRO (arXiv:1910.02054), and weights in parts along a model axis.

Stage 1 divides the optimizer's variables; stage 2 also the gradients, of which a process is sent
the sum of its shard only. After the update each process has the new values of its shards, and the
whole weights are gathered from them. Keras's own optimizers compute the update, to which each
weight is its shard meanwhile (`tfdist.sharding.variables.as_shards`).

An optimizer that computes with whole weights (their norms, statistics of their rows, a product of
them) cannot work on slices. For it each weight has one owner among the processes, which has all of
its state and computes its update; the shards of the others are empty, and they leave it out.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import types
from tfdist._keras import BaseOptimizer, LossScaleOptimizer, unwrapped
from tfdist._tf.distribute import independently
from tfdist.comm.halves import as_of_halves, is_of_halves
from tfdist.comm.replica_collectives import is_sparse
from tfdist.config.mesh import DATA, MODEL, Axis, Mesh
from tfdist.errors import ConfigError
from tfdist.keras.building import build_optimizer
from tfdist.keras.hooks import Hook, exchanged, is_of_program
from tfdist.keras.replica_context import weighed
from tfdist.sharding.exchange import gather, reduce_scatter, slice_of
from tfdist.sharding.handed_out import HandedOut, handed_out
from tfdist.sharding.layout import Cut, Layout, Owned, cut_for, owners
from tfdist.sharding.variables import (
    ShardedVariable,
    WholeWeight,
    as_shards,
    asked,
    divide_update,
    initialize,
)
from tfdist.types import Gradient, KerasVariable, Model, Optimizer, Strategy, Tensor
from tfdist.utils.thread_state import Current

__all__ = [
    "apply_reduced",
    "data_axis",
    "hooks",
    "is_divided",
    "is_reduced_by_tape",
    "note_shards",
    "only_for_optimizers",
    "reduce_to_shards",
    "stage",
    "to_optimizer",
]

#: Keras's optimizers whose update of an element depends on that element alone.
_ELEMENTWISE = (
    *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion"),
    "ScheduleFreeAdamW",
)

#: Those whose update of an element depends on the whole weight, or its whole gradient.
_OF_WHOLE_WEIGHTS = ("Adafactor", "Lamb", "Muon")


class _Division(NamedTuple):
    """The division of a gradient that is applied.

    Attributes:
        axes: those along which other processes have other elements.
        owned: whether this process has the whole gradient, and the others nothing of it.
    """

    axes: frozenset[str]
    owned: bool


#: The divisions of the gradients that are applied.
_divisions: Current[Sequence[_Division]] = Current(())


def hooks() -> list[Hook]:
    """The seams at which optimizers make their variables and look at all gradients."""
    return [
        Hook(BaseOptimizer, "build", _divided, priority=1),
        Hook(keras.optimizers.Adafactor, "build", _statistics_of_owner),
        Hook(BaseOptimizer, "_clip_gradients", _clip_shards, priority=1),
        Hook(LossScaleOptimizer, "check_finite", _agree_on_finite),
    ]


def stage(strategy: types.AnyStrategy) -> int:
    """The stage of ZeRO of a strategy."""
    return int(getattr(strategy, "zero", 0))


def data_axis(strategy: Strategy) -> Axis:
    """The axis of the mesh along which the replicas are."""
    mesh = strategy.mesh or Mesh(((DATA, strategy.shard.workers),))
    return mesh.axis(DATA, strategy.world.worker)


def is_divided(strategy: types.AnyStrategy) -> bool:
    """Whether anything of a model is divided over the processes."""
    parts = (getattr(strategy, name, None) for name in ("parted", "layouts"))
    return bool(stage(strategy)) or any(parts)


def note_shards(weights: Sequence[Any], grads: Sequence[Gradient | None]) -> None:
    """Notes which gradients that a tape has returned to a step are shards.

    Args:
        weights: the sources whose gradients the tape was asked for.
        grads: the gradient of each.
    """
    shards = handed_out.value
    for weight, grad in zip(weights, grads, strict=True):
        if shards is not None and grad is not None and isinstance(weight, ShardedVariable):
            shards.note(grad)


@contextlib.contextmanager
def only_for_optimizers(model: Model) -> Iterator[None]:
    """A block that runs a model's step; what reads its shards of gradients is an optimizer.

    Raises:
        ConfigError: if the step reads one itself.
    """
    shards = HandedOut()
    with handed_out.set(shards):
        try:
            yield
        except Exception as error:
            _check_reads(shards, model, error)
            raise
        _check_reads(shards, model)


def to_optimizer() -> contextlib.AbstractContextManager[None]:
    """A block in which an optimizer reads the shards that a step was given."""
    shown = handed_out.value
    return contextlib.nullcontext() if shown is None else shown.to_optimizer()


def _check_reads(shards: HandedOut, model: Model, failure: Exception | None = None) -> None:
    if shards.read_by_program() or (failure is not None and shards.are_in(failure)):
        reader = f"train_step of {type(model).__name__}"
        if not is_of_program(type(model).train_step):
            reader = f"optimizer {type(model.optimizer).__name__}"
        raise ConfigError(
            f"{asked(tf.distribute.get_strategy())} conflicts with the {reader}, which reads or "
            "changes gradients itself: a process has shards of them only, so that a norm, for one, "
            "would be of a part. To clip, use the optimizer's clipnorm, global_clipnorm or "
            "clipvalue; or leave the option out."
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
    own = {i for i, weight in enumerate(weights) if is_reduced_by_tape(weight)}
    here = [i for i, grad in enumerate(grads) if grad is not None and i not in own]
    grads = list(grads)
    halves = {i for i in here if is_of_halves(grads[i])}
    for i, grad in zip(here, weighed([grads[i] for i in here], optimizer), strict=True):
        grads[i] = grad
    pairs = list(zip(grads, weights, strict=True))
    divided = [
        i
        for i, (grad, weight) in enumerate(pairs)
        if _cut_of(weight) is not None and grad is not None and not is_sparse(grad)
    ]
    cuts = [weights[i].cut for i in divided]
    shards = reduce_scatter(strategy.link(), [grads[i] for i in divided], cuts)
    result: dict[int, Any] = dict(zip(divided, shards, strict=True))
    result.update((i, grads[i]) for i in own)
    rest = [i for i, grad in enumerate(grads) if grad is not None and i not in result]
    sums = strategy.sum_gradients([grads[i] for i in rest]) if rest else []
    result.update((i, _own(each, weights[i])) for i, each in zip(rest, sums, strict=True))
    result.update((i, as_of_halves(result[i])) for i in halves)
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
    if as_shards.is_up or not is_divided(strategy):
        with exchanged.up():
            return original(optimizer, grads, weights)
    if weights is not None:
        build_optimizer(optimizer, list(weights))
    core = unwrapped(optimizer)
    given = list(core._trainable_variables if weights is None else weights)
    if not any(_division_of(each).axes for each in given):
        with exchanged.up():
            return original(optimizer, grads, weights)
    _check_step(strategy, given)
    if not shards:
        grads = [_own(each, weight) for each, weight in zip(grads, given, strict=True)]
    divided = [each for each in given if _cut_of(each) is not None]
    for weight in divided:
        weight.refresh()
    grads, here = _left_to_this_process(grads, given, core)
    present = zip(grads, here, strict=True)
    divisions = [_division_of(each) for grad, each in present if _is_updated(grad, each)]
    unconstrained = _without_constraints(given)
    with to_optimizer(), exchanged.up(), as_shards.up(), _divisions.set(divisions), unconstrained:
        original(optimizer, grads, weights if len(here) == len(given) else here)
    with independently():  # Each weight when its shard has been updated.
        updated = gather(
            strategy.link(),
            [tf.convert_to_tensor(each.shard) for each in divided],
            [each.cut for each in divided],
        )
    for weight, value in zip(divided, updated, strict=True):
        weight.kept.assign(value)
    return None


def _cut_of(weight: Any) -> Cut | None:
    """The division over the replicas of the update of what a process keeps of a weight."""
    cut: Cut | None = getattr(weight, "cut", None)
    return cut


def _division_of(weight: Any) -> _Division:
    """The division of the gradient of a weight, as an optimizer gets it."""
    cuts = weight.layout.cuts if isinstance(weight, (WholeWeight, ShardedVariable)) else ()
    axes = frozenset(cut.axis.name for cut in cuts)
    return _Division(axes, any(isinstance(cut, Owned) for cut in cuts))


def _left_to_this_process(
    grads: Sequence[Any], weights: Sequence[Any], optimizer: Optimizer
) -> tuple[list[Any], list[Any]]:
    """The weights whose update is not another process's, with their gradients.

    Raises:
        ConfigError: if there are more processes than weights that are updated: one that updates
            nothing would not count its steps.
    """
    pairs = list(zip(grads, weights, strict=True))
    cuts = [(grad, _cut_of(each)) for grad, each in pairs]
    owned = [(grad, cut) for grad, cut in cuts if isinstance(cut, Owned)]
    updating = {cut.owner for grad, cut in owned if grad is not None}
    processes = owned[0][1].shards if owned else 0
    if len(updating) < processes:
        raise ConfigError(
            f"{asked(tf.distribute.get_strategy())} conflicts with the optimizer "
            f"{type(optimizer).__name__} on {processes} processes: each of them updates "
            f"whole weights, and only {len(updating)} have one with a gradient. Start fewer "
            "processes, or leave the option out."
        )
    here = [(grad, each) for grad, each in pairs if not _is_elsewhere(each)]
    return [grad for grad, _ in here], [each for _, each in here]


def _is_elsewhere(weight: Any) -> bool:
    cut = _cut_of(weight)
    return isinstance(cut, Owned) and not cut.is_here


def is_reduced_by_tape(weight: Any) -> bool:
    """Whether the gradient that a tape returns is the sum over the replicas already."""
    return isinstance(weight, ShardedVariable) and weight.kept_layout.along(DATA) is not None


def _check_step(strategy: Strategy, weights: Sequence[Any]) -> None:
    """Refuses steps in which shards cannot be exchanged, or gradients may be changed unseen."""
    if tf.executing_eagerly():
        raise ConfigError(
            f"{asked(strategy)} conflicts with a step that runs eagerly (run_eagerly=True, or a "
            "loop outside of tf.function): processes exchange their shards in compiled steps. "
            "Leave run_eagerly out, decorate the step with @tf.function, or leave the option out."
        )
    in_parts = any(isinstance(each, ShardedVariable) for each in weights)
    if in_parts and handed_out.value is None:
        raise ConfigError(
            f"{asked(strategy)} conflicts with a training loop written by hand: what such a loop "
            "does with the gradients, of which a process has its shards, cannot be known. Train "
            "with `fit`, `train_on_batch` or a `train_step`, or leave the option out."
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
    return grad is not None and not getattr(weight, "overwrite_with_gradient", False)


def _own(grad: Gradient | None, weight: Any) -> Gradient | None:
    """This process's shard of a gradient; that of a weight with an owner stays whole."""
    cut = _cut_of(weight)
    return grad if grad is None or cut is None or isinstance(cut, Owned) else slice_of(grad, cut)


def _divided(original: Callable[..., None]) -> Callable[..., None]:
    """Gives weights their shards before the optimizer makes its variables like them."""

    @functools.wraps(original)
    def build(self: Optimizer, variables: Sequence[KerasVariable]) -> None:
        strategy = tf.distribute.get_strategy()
        if is_divided(strategy):
            cuts = _owned if _needs_whole_weights(self, variables, strategy) else _sliced
            for weight, cut in cuts(variables, strategy):
                divide_update(weight, cut, strategy)
        original(self, variables)

    return build


def _statistics_of_owner(original: Callable[..., None]) -> Callable[..., None]:
    """Adafactor's statistics of rows and columns are where their weight is updated.

    The optimizer makes them without a reference to the weight.
    """

    @functools.wraps(original)
    def build(self: types.Adafactor, var_list: Sequence[KerasVariable]) -> None:
        if self.built:
            return
        original(self, var_list)
        for weight, *statistics in zip(var_list, self._r, self._c, strict=True):
            cut = _cut_of(weight)
            for each in statistics:
                if isinstance(cut, Owned) and each is not None and len(each.shape):
                    each._layout = Layout((Owned.of(each.shape, cut.axis, cut.owner),))
                    initialize(each, keras.initializers.Zeros(), tf.distribute.get_strategy())

    return build


def _can_be_divided(weight: Any, strategy: Strategy) -> bool:
    """Whether the update of a weight can be divided, and is not yet.

    Constraints and float8 scales are functions of the whole weight. A `tf.Variable` of the
    program's own, such as an image that is optimized, is not a weight of a model.
    """
    if not isinstance(weight, keras.Variable):
        return False
    whole = weight.constraint is not None or weight.overwrite_with_gradient
    return not whole and stage(strategy) in (1, 2) and _cut_of(weight) is None


def _sliced(variables: Sequence[Any], strategy: Strategy) -> list[tuple[Any, Cut]]:
    """The weights whose update is divided in slices."""
    possible = [each for each in variables if _can_be_divided(each, strategy)]
    kept = [each.kept if isinstance(each, ShardedVariable) else each for each in possible]
    cuts = [cut_for(each.shape, data_axis(strategy)) for each in kept]
    return [(each, cut) for each, cut in zip(possible, cuts, strict=True) if cut is not None]


def _owned(variables: Sequence[Any], strategy: Strategy) -> list[tuple[Any, Cut]]:
    """The weights whose update gets an owner: about as many bytes for each process."""
    axis = data_axis(strategy)
    possible = [
        each
        for each in variables
        if axis.size > 1 and len(each.shape) and _can_be_divided(each, strategy)
    ]
    sizes = [math.prod(each.shape) * tf.as_dtype(each.dtype).size for each in possible]
    chosen = zip(possible, owners(sizes, axis.size), strict=True)
    return [(each, Owned.of(each.shape, axis, owner)) for each, owner in chosen]


def _needs_whole_weights(
    optimizer: Optimizer, variables: Sequence[Any], strategy: Strategy
) -> bool:
    """Whether an optimizer computes with whole weights, and not with one element at a time.

    Raises:
        ConfigError: if neither is known of it, or no process is going to have whole weights.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        return False
    _check_own_steps(optimizer, strategy)
    by = _owner_of(optimizer, "update_step")
    if by in [getattr(keras.optimizers, name) for name in _ELEMENTWISE]:
        return False
    if by in [getattr(keras.optimizers, name) for name in _OF_WHOLE_WEIGHTS]:
        _check_whole_weights(optimizer, variables, strategy)
        return True
    raise ConfigError(
        f"{asked(strategy)} conflicts with the optimizer {type(optimizer).__name__}: each "
        "process updates a part of each weight, which is exact for optimizers that compute "
        f"each element by itself ({', '.join(_ELEMENTWISE)}), or updates some of the weights "
        f"({', '.join(_OF_WHOLE_WEIGHTS)}), and it is not known what {by.__name__}.update_step "
        "computes with. Choose one of these, or leave the option out."
    )


def _owner_of(optimizer: Optimizer, name: str) -> type:
    """The class that a method is of."""
    return next(each for each in type(optimizer).__mro__ if name in vars(each))


#: Methods of Keras's between `apply` and `update_step`, which here compute with shards.
_BEFORE_UPDATES = (
    *("_backend_apply_gradients", "_clip_gradients", "_apply_weight_decay"),
    "_backend_update_step",
)


def _check_own_steps(optimizer: Optimizer, strategy: Strategy) -> None:
    """Refuses methods of the program's own that Keras calls with gradients, which are shards here.

    Raises:
        ConfigError: if there is one.
    """
    for name in _BEFORE_UPDATES:
        by = _owner_of(optimizer, name)
        if not by.__module__.startswith(("keras.", "tfdist.")):
            raise ConfigError(
                f"{asked(strategy)} conflicts with the optimizer {type(optimizer).__name__}: "
                f"{by.__name__}.{name} would compute with a part of each gradient. Use the "
                "optimizer's own clipnorm, global_clipnorm, clipvalue and weight_decay, or leave "
                "the option out."
            )


def _check_whole_weights(
    optimizer: Optimizer, variables: Sequence[Any], strategy: Strategy
) -> None:
    """Refuses weights of which no process has the whole, or that are updated in slices already."""
    name = type(optimizer).__name__
    if strategy.parted is not None or strategy.layouts or stage(strategy) > 2:
        raise ConfigError(
            f"{asked(strategy)} conflicts with the optimizer {name}, which computes with whole "
            "weights: a process keeps parts of them. Choose zero=2 without a mesh, or one of "
            f"{', '.join(_ELEMENTWISE)}."
        )
    cuts = [(each, _cut_of(each)) for each in variables]
    sliced = [each.path for each, cut in cuts if cut is not None and not isinstance(cut, Owned)]
    if sliced:
        raise ConfigError(
            f"{asked(strategy)} conflicts with the optimizer {name}, which updates whole weights: "
            f"{sliced[0]!r} is updated in slices since the model was trained with another "
            "optimizer. Make the model anew, with the weights of this one "
            "(keras.models.clone_model, set_weights)."
        )


def _clip_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Norms are those of whole gradients, of which a process has shards."""

    @functools.wraps(original)
    def clip_gradients(self: Optimizer, grads: Sequence[Gradient]) -> Sequence[Gradient]:
        limit = self.clipnorm or self.global_clipnorm
        divisions = _divisions.value if as_shards.is_up else ()
        owned = all(each.owned or not each.axes for each in divisions)
        if not limit or not divisions or (self.clipnorm and owned):
            return original(self, grads)
        squares = _squares(list(grads), divisions)
        if self.clipnorm:
            return [_within(limit, g, tf.sqrt(s)) for g, s in zip(grads, squares, strict=True)]
        norm = tf.sqrt(_total(squares, divisions))
        # Keras makes gradients of rows dense here, so that Adam's moments of all rows decay.
        return [_within(limit, tf.convert_to_tensor(grad), norm) for grad in grads]

    return clip_gradients


def _squares(grads: list[Any], divisions: Sequence[_Division]) -> list[Tensor]:
    """The squared norm of each gradient: of the whole one, if this process has a part."""
    squares = [tf.reduce_sum(tf.square(_values(grad))) for grad in grads]
    for axis in (DATA, MODEL):
        divided = [i for i, each in enumerate(divisions) if axis in each.axes and not each.owned]
        if not divided:
            continue
        own = tf.stack([tf.cast(squares[i], tf.float32) for i in divided])
        sums = tf.unstack(tf.distribute.get_strategy().link(axis).sum([own])[0], len(divided))
        for i, total in zip(divided, sums, strict=True):
            squares[i] = total
    return squares


def _total(squares: list[Tensor], divisions: Sequence[_Division]) -> Tensor:
    """The sum over all gradients, those that other processes own included."""
    squares = [tf.cast(each, tf.float32) for each in squares]
    own = [each for each, of in zip(squares, divisions, strict=True) if of.owned]
    rest = [each for each, of in zip(squares, divisions, strict=True) if not of.owned]
    if own:
        rest += tf.distribute.get_strategy().link(DATA).sum([tf.add_n(own)])
    total: Tensor = tf.add_n(rest)
    return total


def _values(grad: Gradient) -> Tensor:
    return grad.values if is_sparse(grad) else grad


def _within(limit: float, grad: Gradient, norm: Tensor) -> Gradient:
    """A gradient scaled to a norm that is not above a limit; NaN if the norm is not finite."""
    factor = tf.cast(limit / tf.maximum(norm, limit) + (norm - norm), grad.dtype)
    if is_sparse(grad):
        return tf.IndexedSlices(grad.values * factor, grad.indices, grad.dense_shape)
    return grad * factor


def _agree_on_finite(original: Callable[..., Any]) -> Callable[..., Any]:
    """A step is skipped by all processes if one has an infinity in what it has of gradients."""

    @functools.wraps(original)
    def check_finite(self: Optimizer, grads: Sequence[Gradient]) -> Tensor:
        finite = original(self, grads)
        if not as_shards.is_up:
            return finite
        bad = tf.cast(tf.logical_not(finite), tf.float32)
        for axis in (DATA, MODEL):
            if any(axis in each.axes for each in _divisions.value):
                bad = tf.distribute.get_strategy().link(axis).sum([bad])[0]
        return bad < 0.5

    return check_finite
