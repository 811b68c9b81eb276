"""Keras variables of which a process updates a part.

To a program such a variable is whole: its shape, its value, what is assigned to it and what is
saved of it. To an optimizer that runs in a block of `as_shards` it is this process's shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist._keras import in_symbolic_scope
from tfdist._tf.distribute import eagerly_outside_of_scope, local_results
from tfdist.comm import host_collectives
from tfdist.errors import ConfigError
from tfdist.sharding.exchange import gather, slice_of
from tfdist.sharding.gathering import gathered
from tfdist.sharding.layout import Layout
from tfdist.types import Array, Gradient, Strategy, Tensor, Variable
from tfdist.utils.thread_state import Current, Flag

#: Weighs a gradient by the examples of a replica.
Weigh: TypeAlias = Callable[[Gradient], Gradient]

__all__ = [
    "ShardedVariable",
    "WholeWeight",
    "as_shards",
    "at_hand",
    "divide",
    "initialize",
    "initialize_weight",
    "noted",
    "read_together",
]

#: Set while an optimizer runs, to which sharded variables are their shards.
as_shards = Flag()


class _Whole(NamedTuple):
    """The whole value of a sharded variable.

    Attributes:
        value: a tensor or an array.
        assignments: of the variable, before the value was read.
    """

    value: Any
    assignments: int


#: Whole values of sharded variables by `id`, read together with the other processes; others are
#: read when they are asked for.
_at_hand: Current[Mapping[int, _Whole]] = Current({})

#: The sharded variables that have been read, by `id`, in order; None if nobody wants to know.
noted: Current[dict[int, Any] | None] = Current(None)


class _Shard(keras.Variable):  # type: ignore[misc]
    """A variable with a shard of its own in each process.

    Attributes:
        layout: how it is divided.
        shard: TensorFlow's variable of this process's shard.
    """

    layout: Layout
    shard: Any

    @property
    def value(self) -> Any:
        """The shard in a block of `as_shards`, else the whole value."""
        return self._maybe_autocast(self.shard) if as_shards.is_up else self._whole()

    @property
    def shape(self) -> tf.TensorShape:
        """The shard's shape in a block of `as_shards`, else the whole one."""
        return self.shard.shape if as_shards.is_up else tf.TensorShape(self.layout.shape)

    def _whole(self) -> Any:
        raise NotImplementedError


class WholeWeight(_Shard):
    """A weight that each process keeps whole, and updates a shard of."""

    def _whole(self) -> Any:
        return keras.Variable.value.fget(self)

    def _direct_assign(self, value: Tensor) -> None:
        if as_shards.is_up:
            self.shard.assign(tf.cast(value, self.shard.dtype))
        else:
            super()._direct_assign(value)

    def refresh(self) -> None:
        """Takes the shard from the whole weight, which the program may have changed."""
        whole = tf.convert_to_tensor(self._value)
        self.shard.assign(slice_of(whole, self.layout))


class ShardedVariable(_Shard):
    """A variable of which each process keeps its shard only."""

    _strategy: Strategy
    _weigh: Weigh | None = None
    _assignments = 0

    @property
    def is_at_hand(self) -> bool:
        """Whether the whole value is there already; not if it has been assigned since."""
        read = _at_hand.value.get(id(self))
        return read is not None and read.assignments == self._assignments

    @property
    def handle(self) -> Any:
        """The shard's: gradients are those of the shard."""
        return self.shard.handle

    def _whole(self) -> Any:
        if self.is_at_hand:
            return self._maybe_autocast(tf.convert_to_tensor(_at_hand.value[id(self)].value))
        if noted.value is not None:
            noted.value[id(self)] = self
            return tf.zeros(self.layout.shape, self._dtype)
        within = tf.distribute.get_strategy() is self._strategy
        if within and not tf.distribute.in_cross_replica_context():
            return self._maybe_autocast(self.gathered())
        if in_symbolic_scope():
            return self._maybe_autocast(tf.zeros(self.layout.shape, self._dtype))
        return self._maybe_autocast(self.read())

    def gathered(self) -> Tensor:
        """The whole value within a replica; that of a weight has a gradient."""
        shard = tf.convert_to_tensor(self.shard)
        if self._weigh is not None:
            return gathered(self._strategy, shard, self.layout, self._weigh)
        return gather(self._strategy.link(), [shard], [self.layout])[0]

    def read(self) -> Tensor:
        """The whole value, outside of any step. All processes must read it.

        Raises:
            ConfigError: within a `tf.function`, where it would be a constant.
            TfdistError: if another process is at another place of the program.
        """
        if not tf.executing_eagerly():
            raise ConfigError(
                "zero=3 conflicts with a tf.function, or a loop in one, that calls the model "
                f"outside of Strategy.run: {self.path!r} is divided over the processes, which must "
                "gather it together. Train with `fit` or a `train_step`, call `model.predict`, or "
                "the model without tf.function; or choose zero=2."
            )
        strategy = self._strategy
        with tf.init_scope(), strategy.scope():
            host_collectives.barrier(strategy, f"reading {self.path!r}, which is divided")
            whole: Tensor = local_results(strategy, strategy.run(self.gathered))[0]
        return whole

    def numpy(self) -> Array:
        """The whole value; see `read`."""
        return np.asarray(self.value)

    def __array__(self, dtype: Any = None) -> Array:
        return np.asarray(self.value, dtype)

    def _direct_assign(self, value: Tensor) -> None:
        self._assignments += 1
        own = value if as_shards.is_up else slice_of(tf.convert_to_tensor(value), self.layout)
        self.shard.assign(tf.cast(own, self.shard.dtype))

    def _serialize_to_tensors(self) -> dict[str, Tensor]:
        return {"VARIABLE_VALUE": tf.convert_to_tensor(self.value)}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Tensor]) -> Any:
        self.assign(restored_tensors["VARIABLE_VALUE"])
        return self.shard


def divide(weight: Any, layout: Layout, strategy: Strategy) -> None:
    """Gives a weight a shard, which optimizers update.

    Args:
        weight: a Keras variable, made in the strategy's scope.
        layout: how it is divided; optimizers' variables of it are divided in the same way.
        strategy: the strategy.
    """
    container = weight.value
    weight.layout, weight._layout = layout, layout
    name = container.name.split(":")[0]

    def value() -> Tensor:
        return slice_of(tf.convert_to_tensor(container), layout)

    weight.shard = _make(strategy, value, weight.trainable, name)
    # By this Keras's optimizers find the weight that a replica's variable belongs to.
    weight.shard._distributed_container = lambda: container
    weight.__class__ = WholeWeight


def initialize_weight(variable: Any, strategy: Strategy, layout: Layout, weigh: Weigh) -> None:
    """Leaves a process its shard of a weight that has just been created.

    Args:
        variable: the Keras variable, which has its whole value; it becomes a `ShardedVariable`.
        strategy: the strategy.
        layout: how the weight is divided; optimizers' variables of it are divided in the same way.
        weigh: weighs a gradient by this replica's examples.
    """
    whole = tf.convert_to_tensor(variable._value)
    variable.layout = variable._layout = layout
    variable._strategy, variable._weigh = strategy, weigh
    # A slice may be a view, which would keep the whole value alive.
    copy = functools.partial(tf.raw_ops.DeepCopy, x=slice_of(whole, layout))
    variable.shard = variable._value = _make(strategy, copy, True, variable.name)
    variable.__class__ = ShardedVariable


def initialize(variable: Any, initializer: Callable[..., Any], strategy: Strategy) -> None:
    """Makes the shard of a Keras variable that is being created with a `Layout`.

    Args:
        variable: the Keras variable; it becomes a `ShardedVariable`.
        initializer: makes the whole value, of a shape and a type.
        strategy: the strategy.
    """
    layout, dtype = variable._layout, variable._dtype
    variable.layout, variable._strategy = layout, strategy
    same = isinstance(initializer, (keras.initializers.Zeros, keras.initializers.Constant))
    make = functools.partial(initializer, dtype=dtype)

    def value() -> Tensor:
        if same:
            shard: Tensor = tf.convert_to_tensor(make(layout.shard_shape))
            return shard
        return slice_of(tf.convert_to_tensor(make(layout.shape)), layout)

    variable.shard = variable._value = _make(strategy, value, False, variable.name)
    variable.__class__ = ShardedVariable


def _make(strategy: Strategy, value: Callable[[], Tensor], trainable: bool, name: str) -> Variable:
    """A variable of this process's own: the strategy would give it the chief's value."""
    with (
        tf.init_scope(),
        eagerly_outside_of_scope(),
        tf.device(strategy.extended.worker_devices[0]),
    ):
        made: Variable = tf.Variable(value(), trainable=trainable, name=name)
        return made


@contextmanager
def read_together(variables: list[ShardedVariable], keep: bool) -> Iterator[None]:
    """Reads sharded variables one after the other, on all processes; in the block they are at hand.

    Args:
        variables: the same ones in the same order in each process.
        keep: whether this process needs the values; others hold one at a time only.
    """
    values = []
    for variable in variables:
        whole = variable.read()
        if keep:
            values.append((variable, whole.numpy()))
    with at_hand(values):
        yield


@contextmanager
def at_hand(values: Iterable[tuple[ShardedVariable, Any]]) -> Iterator[None]:
    """A block in which variables have the whole values given, until they are assigned."""
    known = {id(each): _Whole(value, each._assignments) for each, value in values}
    with _at_hand.set({**_at_hand.value, **known}):
        yield
