"""Keras variables of which a process updates a part.

To a program such a variable is whole: its shape, its value, what is assigned to it and what is
saved of it. To an optimizer that runs in a block of `as_shards` it is this process's shard.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist._keras import in_symbolic_scope
from tfdist._tf.distribute import eagerly_outside_of_scope, local_results
from tfdist._tf.graphs import at_call, made_for_dataset
from tfdist.comm import host_collectives
from tfdist.config.mesh import DATA, MODEL
from tfdist.errors import ConfigError
from tfdist.sharding.checkpoint import Saved
from tfdist.sharding.exchange import gather, own_shard, slice_of
from tfdist.sharding.gathering import gathered
from tfdist.sharding.layout import Cut, Layout
from tfdist.sharding.relayout import remembered, whole_weight_of
from tfdist.types import (
    AnyStrategy,
    Array,
    DType,
    Gradient,
    KerasVariable,
    Strategy,
    Tensor,
    Variable,
)
from tfdist.utils.thread_state import Current, Flag

__all__ = [
    "InStep",
    "ShardedVariable",
    "WholeWeight",
    "as_shards",
    "asked",
    "at_hand",
    "divide_update",
    "initialize",
    "initialize_weight",
    "noted",
    "read_together",
    "variable_of",
]


class InStep(NamedTuple):
    """The functions by which a replica's step follows a divided weight.

    Attributes:
        weigh: weighs a gradient by the examples of the replica.
        note_assigned: notes that the program has assigned a value.
        note_read: notes that the weight is read.
    """

    weigh: Callable[[Gradient], Gradient]
    note_assigned: Callable[[KerasVariable, Any], None]
    note_read: Callable[[KerasVariable], None]


#: The attribute of a value for its variable.
_VARIABLE = "_tfdist_variable"

#: The methods of TensorFlow's variables, which are the values of Keras's, that a value has too.
_ASSIGNING = ("assign", "assign_add", "assign_sub")

#: Seconds that a process waits for the others at a divided variable that it reads.
READ_SECONDS = 300.0

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
        layout: how it is divided, as an optimizer sees it.
        shard: TensorFlow's variable that an optimizer updates.
        cut: the division over the replicas of what this process keeps, of which `shard` is a part
            (ZeRO stages 1 and 2); None if it keeps the shard alone.
    """

    layout: Layout
    shard: Any
    cut: Cut | None = None

    @property
    def value(self) -> Any:
        """The shard in a block of `as_shards`, else the whole value."""
        return self._maybe_autocast(self.shard) if as_shards.is_up else self._whole()

    @property
    def shape(self) -> tf.TensorShape:
        """The shard's shape in a block of `as_shards`, else the whole one."""
        return self.shard.shape if as_shards.is_up else tf.TensorShape(self.layout.shape)

    @property
    def kept(self) -> Any:
        """TensorFlow's variable of what this process keeps."""
        raise NotImplementedError

    @property
    def _shared_name(self) -> str:
        """The name by which `tf.train.Checkpoint` knows a variable."""
        return str(self.kept._shared_name)

    def __repr__(self) -> str:
        """The variable without its value, which all processes would have to read together."""
        return f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}>"

    def refresh(self) -> None:
        """Takes the shard from what is kept, which the program may have changed."""
        assert self.cut is not None
        self.shard.assign(slice_of(tf.convert_to_tensor(self.kept), self.cut))

    def _whole(self) -> Any:
        raise NotImplementedError


class WholeWeight(_Shard):
    """A weight that each process keeps whole, and updates a shard of."""

    @property
    def kept(self) -> Any:
        """The whole weight."""
        return self._value

    def _whole(self) -> Any:
        return keras.Variable.value.fget(self)

    def _direct_assign(self, value: Tensor) -> None:
        if as_shards.is_up:
            self.shard.assign(tf.cast(value, self.shard.dtype))
        else:
            super()._direct_assign(value)


def variable_of(source: Any) -> Any:
    """The divided variable that a source of a gradient is the value of, or the source itself.

    In Keras a variable's value is TensorFlow's variable, of which a tape knows all uses.
    """
    return getattr(source, _VARIABLE, source)


class ShardedVariable(_Shard):
    """A variable of which each process keeps a part only.

    Attributes:
        kept_layout: how what is kept is divided.
    """

    kept_layout: Layout
    _strategy: Strategy
    _in_step: InStep | None = None
    _assignments = 0

    @property
    def kept(self) -> Any:
        """The part, which is the shard unless its update is divided further."""
        return self._value

    @property
    def is_at_hand(self) -> bool:
        """Whether the whole value is there already; not if it has been assigned since."""
        read = _at_hand.value.get(id(self))
        return read is not None and read.assignments == self._assignments

    @property
    def handle(self) -> Any:
        """That of what is kept: gradients are those of the part."""
        return self.kept.handle

    def _whole(self) -> Any:
        whole = self._read_whole()
        setattr(whole, _VARIABLE, self)
        for name in _ASSIGNING:
            setattr(whole, name, getattr(self, name))
        return whole

    def _read_whole(self) -> Any:
        if self.is_at_hand:
            return self._maybe_autocast(tf.convert_to_tensor(_at_hand.value[id(self)].value))
        if noted.value is not None:
            noted.value[id(self)] = self
            return tf.zeros(self.layout.shape, self._dtype)
        if self._in_replica:
            return self._maybe_autocast(self.gathered())
        if in_symbolic_scope():
            return self._maybe_autocast(tf.zeros(self.layout.shape, self._dtype))
        return self._maybe_autocast(self.read())

    @property
    def _in_replica(self) -> bool:
        within = tf.distribute.get_strategy() is self._strategy
        return within and not tf.distribute.in_cross_replica_context()

    def gathered(self) -> Tensor:
        """The whole value within a replica; that of a weight has a gradient."""
        part, cut = self._part(), self.kept_layout.along(MODEL)
        if cut is None:
            return part
        with self._strategy.extended.outside_of_loops():
            return whole_weight_of(self._strategy.link(MODEL), part, cut)

    def part(self) -> Tensor | None:
        """The part that its layer computes with, within a replica.

        None if the weight is not divided along the model axis, and outside of a replica.
        """
        if self.kept_layout.along(MODEL) is None or in_symbolic_scope() or not self._in_replica:
            return None
        cached = remembered(_at_hand.value[id(self)].value) if self.is_at_hand else None
        part: Tensor = self._maybe_autocast(cached.value if cached else self._part())
        return part

    def _part(self) -> Tensor:
        """The kept part, gathered along the data axis if it is divided along that."""
        if self._in_step is not None:
            self._in_step.note_read(self)
        # A loop or a branch of the program's takes what is gathered before it: once, and by all
        # processes, of which some may take another branch.
        with self._strategy.extended.outside_of_loops():
            kept: Tensor = tf.convert_to_tensor(self.kept)
            cut = self.kept_layout.along(DATA)
            if cut is None:
                return kept
            if self._in_step is not None:
                return gathered(self._strategy, kept, cut, self._in_step.weigh)
            return gather(self._strategy.link(), [kept], [cut])[0]

    def read(self) -> Tensor:
        """The whole value, outside of any step. All processes must read it.

        In a `tf.function` it is the value of when that is called, which all processes must do.

        Raises:
            ConfigError: in a graph of TensorFlow 1.
            TfdistError: if another process is at another place of the program.
        """
        if tf.executing_eagerly():
            return self._read_now()
        spec = tf.TensorSpec(self.layout.shape, self.kept.dtype)
        value = at_call(id(self), self._read_at_call, spec)
        if value is None:
            raise ConfigError(
                f"{asked(self._strategy)} conflicts with a graph of TensorFlow 1 that reads "
                f"{self.path!r}: the processes, over which it is divided, must gather it together. "
                "Leave the option out."
            )
        return value

    def _read_at_call(self) -> Tensor:
        if made_for_dataset():
            raise ConfigError(
                f"{asked(self._strategy)} conflicts with a function of a data set (Dataset.map, "
                f"filter, …) that reads {self.path!r}: the weight is divided over the processes, "
                "and the data set would keep the value of now. Call the model on what the data "
                "set gives (model.predict), or leave the option out."
            )
        return self._read_now()

    def _read_now(self) -> Tensor:
        strategy = self._strategy
        with tf.init_scope(), strategy.scope():
            name = f"reading {self.path!r}, which is divided"
            host_collectives.barrier(strategy, name, READ_SECONDS)
            kept = tf.convert_to_tensor(self.kept)
            return _gathering_of(strategy, self.kept_layout, kept.dtype)(kept)

    def assign(self, value: Any) -> Any:
        """Assigns a whole value, of which the part is kept; of a saved one only that is read."""
        if not isinstance(value, Saved):
            return super().assign(value)
        if value.shape != self.layout.shape:
            raise ValueError(
                f"{self.path!r} has the shape {self.layout.shape}, and what was saved has "
                f"{value.shape}."
            )
        self._assignments += 1
        self.kept.assign(tf.cast(value.read(self.kept_layout.region), self.kept.dtype))
        return value

    def numpy(self) -> Array:
        """The whole value; see `read`."""
        return np.asarray(self.value)

    def __array__(self, dtype: Any = None) -> Array:
        return np.asarray(self.value, dtype)

    def _direct_assign(self, value: Tensor) -> None:
        self._assignments += 1
        if as_shards.is_up:
            self.shard.assign(tf.cast(value, self.shard.dtype))
            return
        if self._in_step is not None:
            self._in_step.note_assigned(self, value)
        if not (self._in_replica or tf.executing_eagerly()):
            raise ConfigError(
                f"{asked(self._strategy)} conflicts with a tf.function that assigns {self.path!r} "
                "outside of Strategy.run: the weight is divided over the processes. Assign it in "
                "`train_step`, or eagerly; or leave the option out."
            )
        own = tf.cast(own_shard(tf.convert_to_tensor(value), self.kept_layout), self.kept.dtype)
        # A slice may be a view, which would keep the whole value alive.
        self.kept.assign(tf.raw_ops.DeepCopy(x=own))

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> Mapping[str, object]:
        """Refuses `tf.saved_model.save`, which takes TensorFlow's variables for whole weights."""
        if save_type == "savedmodel":
            raise ConfigError(
                f"tf.saved_model.save conflicts with {asked(self._strategy)}, which divides "
                f"{self.path!r} over the processes. Save the model as a .keras file, and export "
                "that in one process: keras.models.load_model(path).export(directory)."
            )
        children: Mapping[str, object] = super()._trackable_children(save_type, **kwargs)
        return children

    def _serialize_to_tensors(self) -> dict[str, Tensor]:
        return {"VARIABLE_VALUE": tf.convert_to_tensor(self.value)}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Tensor]) -> Any:
        self.assign(restored_tensors["VARIABLE_VALUE"])
        return self.kept


_Gathering = Callable[[Tensor], Tensor]

#: For each strategy its compiled functions that gather a whole value, by layout and type.
_gatherings: weakref.WeakKeyDictionary[Any, dict[tuple[Layout, DType], _Gathering]] = (
    weakref.WeakKeyDictionary()
)


def _gathering_of(strategy: Strategy, layout: Layout, dtype: DType) -> _Gathering:
    """A function that gathers a whole value of each process's part, outside of any step.

    All variables of one layout share it: a model is read weight by weight, and tracing a function
    takes longer than to gather a small one.
    """
    known = _gatherings.setdefault(strategy, {})
    if (layout, dtype) not in known:
        alive: Callable[[], Any] = weakref.ref(strategy)

        def in_replica(part: Tensor) -> Tensor:
            for cut in reversed(layout.cuts):
                (part,) = gather(alive().link(cut.axis.name), [part], [cut])
            return part

        def whole(part: Tensor) -> Tensor:
            value: Tensor = local_results(alive(), alive().run(in_replica, args=(part,)))[0]
            return value

        spec = tf.TensorSpec(layout.shard_shape, dtype)
        compiled = tf.function(whole, autograph=False)
        # A concrete one is compiled also if functions are set to run eagerly.
        known[layout, dtype] = compiled.get_concrete_function(spec)
    return known[layout, dtype]


def asked(strategy: AnyStrategy) -> str:
    """The option by which a strategy divides the model, as the user set it."""
    zero = int(getattr(strategy, "zero", 0))
    return f"zero={zero}" if zero else f"mesh='{getattr(strategy, 'mesh', None)}'"


def divide_update(weight: Any, cut: Cut, strategy: Strategy) -> None:
    """Gives a weight a shard of what each process keeps of it, which optimizers update.

    Args:
        weight: a Keras variable, made in the strategy's scope: whole, or divided along the model
            axis.
        cut: the division over the replicas of what is kept; optimizers' variables of it are divided
            in the same way.
        strategy: the strategy.
    """
    parted = isinstance(weight, ShardedVariable)
    container = weight.kept if parted else weight.value
    before = weight.kept_layout.cuts if parted else ()
    weight.layout = weight._layout = Layout((*before, cut))
    weight.cut = cut
    name = container.name.split(":")[0]

    def value() -> Tensor:
        part: Tensor = slice_of(tf.convert_to_tensor(container), cut)
        return part

    weight.shard = _make(strategy, value, weight.trainable, name)
    # By this Keras's optimizers find the weight that a replica's variable belongs to.
    weight.shard._distributed_container = lambda: container
    if not parted:
        weight.__class__ = WholeWeight


def initialize_weight(variable: Any, strategy: Strategy, layout: Layout, in_step: InStep) -> None:
    """Leaves a process its shard of a weight that has just been created.

    Args:
        variable: the Keras variable, which has its whole value; it becomes a `ShardedVariable`.
        strategy: the strategy.
        layout: how the weight is divided; optimizers' variables of it are divided in the same way.
        in_step: the functions by which a replica's step follows it.
    """
    whole = tf.convert_to_tensor(variable._value)
    variable.layout = variable._layout = variable.kept_layout = layout
    variable._strategy, variable._in_step = strategy, in_step
    # A slice may be a view, which would keep the whole value alive.
    copy = functools.partial(tf.raw_ops.DeepCopy, x=own_shard(whole, layout))
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
    variable.layout = variable.kept_layout = layout
    variable._strategy = strategy
    same = isinstance(initializer, (keras.initializers.Zeros, keras.initializers.Constant))
    make = functools.partial(initializer, dtype=dtype)

    def value() -> Tensor:
        if same:
            shard: Tensor = tf.convert_to_tensor(make(layout.shard_shape))
            return shard
        return own_shard(tf.convert_to_tensor(make(layout.shape)), layout)

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
