"""Weights of which each process keeps a part only, and optimizers' variables like them.

A layer's weights are gathered when it is called (`tfdist.sharding.gathering`). The hooks below keep
Keras from reading a whole weight where it wants to know the variable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.callbacks import SwapEMAWeights

from tfdist._keras import RNN, BaseOptimizer, TFOptimizer, Variable
from tfdist.comm.batch_dependence import is_symbolic
from tfdist.config.mesh import MODEL
from tfdist.errors import ConfigError
from tfdist.keras.hooks import Hook, by_example, on_gradients
from tfdist.keras.layouts import layout_of
from tfdist.keras.parts import part_behind
from tfdist.keras.replica_context import current_step
from tfdist.keras.weights import note_assigned, warn_of_own_start
from tfdist.sharding.gathering import gather_again, input_before
from tfdist.sharding.layout import Layout
from tfdist.sharding.relayout import remembered
from tfdist.sharding.variables import (
    InStep,
    ShardedVariable,
    as_shards,
    asked,
    at_hand,
    initialize,
    initialize_weight,
    variable_of,
)
from tfdist.types import Gradient, KerasVariable, Model, Optimizer, Strategy, Structure
from tfdist.utils.thread_state import Current

__all__ = ["hooks"]

#: The layout of the weight that an optimizer is making a variable for. Keras 3.14 does not hand it
#: to the variable.
_like: Current[object] = Current(None)


def hooks() -> list[Hook]:
    """The seams at which variables are made and weights are read."""
    return [
        Hook(Variable, "_initialize_with_initializer", _as_shard),
        Hook(keras.Model, "export", _refuse_export),
        Hook(TFOptimizer, "_var_key", _of_shard),
        Hook(TFOptimizer, "_overwrite_model_variables_with_average_value", _shards_by_averages),
        Hook(SwapEMAWeights, "_tf_swap_variables", _whole_values("_backend_swap_variables")),
        Hook(
            SwapEMAWeights,
            "_tf_finalize_ema_values",
            _whole_values("_backend_finalize_ema_values"),
        ),
        Hook(TFOptimizer, "add_variable_from_reference", _like_shard, priority=1),
        Hook(keras.layers.Layer, "__call__", _gathered_for_the_call, priority=1),
        *on_gradients(_gathered_again, priority=3),
        Hook(tf.GradientTape, "jacobian", _refuse_divided, priority=1),
        Hook(tf.GradientTape, "watch", _watch_variable, priority=1),
    ]


def _as_shard(original: Callable[..., None]) -> Callable[..., None]:
    """Keeps a shard only of a variable that an optimizer makes like a divided weight."""

    @functools.wraps(original)
    def initialize_with_initializer(self: Any, initializer: Callable[..., Any]) -> None:
        strategy = tf.distribute.get_strategy()
        like = getattr(self, "_layout", None) or _like.value
        if isinstance(like, Layout):
            self._layout = like
            initialize(self, initializer, strategy)
            return
        original(self, initializer)
        layout = layout_of(self, strategy)
        if layout is not None:
            if not tf.executing_eagerly():  # TensorFlow gives it a value after the trace.
                raise ConfigError(
                    f"{asked(strategy)} conflicts with the weight {self.path!r}, which is made "
                    "while a tf.function of the program is traced. Build the model before: call "
                    "it once on a batch, or give it an Input or model.build(shape)."
                )
            initialize_weight(self, strategy, layout, _IN_STEP)

    return initialize_with_initializer


def _refuse_export(original: Callable[..., Any]) -> Callable[..., Any]:
    """A graph that serves needs whole weights."""

    @functools.wraps(original)
    def export(self: Model, *args: object, **kwargs: object) -> object:
        if any(isinstance(each, ShardedVariable) for each in self.weights):
            raise ConfigError(
                f"model.export conflicts with {asked(tf.distribute.get_strategy())}, under which "
                "no process has the whole weights. Save the model as a .keras file, and export "
                "that in one process: "
                "keras.models.load_model(path).export(directory)."
            )
        return original(self, *args, **kwargs)

    return export


def _of_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer knows a weight by its variable, not by its value."""

    @functools.wraps(original)
    def var_key(self: Optimizer, variable: object) -> object:
        if not isinstance(variable, ShardedVariable):  # its value may be that of a step
            return original(self, getattr(variable, "_value", variable))
        with as_shards.up():
            return original(self, variable)

    return var_key


def _shards_by_averages(original: Callable[..., Any]) -> Callable[..., Any]:
    """At the end of `fit` a shard takes over its own average."""

    @functools.wraps(original)
    def overwrite(self: Optimizer, trainable_variables: Sequence[Any]) -> None:
        averages = self._model_variables_moving_average
        # Of an optimizer for some of the weights Keras takes as many as it has averages.
        pairs = list(zip(trainable_variables, averages, strict=False))
        if as_shards.is_up or not any(isinstance(each, ShardedVariable) for each, _ in pairs):
            original(self, trainable_variables)
            return
        for variable, average in pairs:
            if isinstance(average, ShardedVariable):
                variable.shard.assign(average.shard)
            elif average is not None:
                variable.assign(average.value)

    return overwrite


def _whole_values(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def make(original: Callable[..., None]) -> Callable[..., None]:
        """The callback adds TensorFlow's variables up, which shards are not; whole values do."""

        @functools.wraps(original)
        def exchange(self: Any, optimizer: Optimizer) -> None:
            kept = (*optimizer._trainable_variables, *optimizer._model_variables_moving_average)
            divided = any(isinstance(each, ShardedVariable) for each in kept)
            getattr(self, name)(optimizer) if divided else original(self, optimizer)

        return exchange

    return make


def _like_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """TensorFlow places a variable beside its weight, which it wants to be the strategy's."""

    @functools.wraps(original)
    def add_variable_from_reference(
        self: Optimizer, reference_variable: Any, *args: Any, **kwargs: Any
    ) -> KerasVariable:
        sharded = isinstance(reference_variable, ShardedVariable)
        plain = BaseOptimizer.add_variable_from_reference if sharded else original
        with _like.set(getattr(reference_variable, "_layout", None)):
            return plain(self, reference_variable, *args, **kwargs)

    return add_variable_from_reference


def _weigh(gradient: Gradient) -> Gradient:
    """A gradient of a replica's own mean, weighed by its examples."""
    step = current_step()
    if step is None:
        return gradient
    scaled = [optimizer for _, optimizer in step.scaled_losses.values()]
    return step.weigh_gradient(gradient, scaled[0] if scaled else None)


def _note_read(weight: KerasVariable) -> None:
    """Notes that a step reads a weight.

    Raises:
        ConfigError: within a `tf.vectorized_map`, which can neither repeat an exchange for each
            example, nor follow one that is made after the trace (`tfdist.sharding.deferred`).
    """
    if by_example.is_up:
        raise ConfigError(
            f"{asked(tf.distribute.get_strategy())} conflicts with tf.vectorized_map of a function "
            f"that reads {weight.path!r}: the weight is divided over the processes, which cannot "
            "exchange its parts there. Use tf.map_fn instead, or leave the option out."
        )
    warn_of_own_start(weight)


_IN_STEP = InStep(_weigh, note_assigned, _note_read)


def _gathered_for_the_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's weights are gathered once for a call of it, when the layer before begins."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.trainable_variables if isinstance(self, RNN) else self._trainable_variables
        divided = [v for v in own if isinstance(v, ShardedVariable) and not v.is_at_hand]
        tensors = [each for each in tf.nest.flatten((args, kwargs)) if is_symbolic(each)]
        if not divided or not tensors or tf.distribute.in_cross_replica_context():
            return original(self, *args, **kwargs)
        part = remembered(tensors[0])
        begun = input_before(tensors[0] if part is None else part.value)
        with tf.control_dependencies([begun]):
            wholes = [(each, each.gathered()) for each in divided]
        with at_hand(wholes):
            return original(self, *args, **kwargs)

    return call


def _gathered_again(original: Callable[..., Any]) -> Callable[..., Any]:
    """Weights of the forward pass are not kept for the backward pass."""

    @functools.wraps(original)
    def gradient(
        self: object, target: object, sources: Structure, *args: object, **kwargs: object
    ) -> object:
        sources = tf.nest.map_structure(variable_of, sources)
        _refuse_parts(sources)
        _refuse_outside_of_replica(sources)
        try:
            with gather_again():
                return original(self, target, sources, *args, **kwargs)
        except LookupError as error:
            if "Collective" not in str(error):
                raise
            raise ConfigError(
                f"{asked(tf.distribute.get_strategy())} conflicts with a gradient of gradients by "
                "tf.gradients, and with tape.batch_jacobian: weights are gathered for them, and "
                "TensorFlow has no gradient of that there. Nest tf.GradientTapes instead, or take "
                "tf.stop_gradient of the first gradient."
            ) from error

    return gradient


def _refuse_outside_of_replica(sources: Structure) -> None:
    """Refuses gradients of weights that were read whole, which no tape follows to the parts."""
    if not tf.distribute.in_cross_replica_context():
        return
    for each in tf.nest.flatten(sources):
        if isinstance(each, ShardedVariable):
            raise ConfigError(
                f"{asked(tf.distribute.get_strategy())} conflicts with a gradient of {each.path!r} "
                "outside of Strategy.run: the weight is divided over the processes. Take it in "
                "`train_step`, or leave the option out."
            )


def _kept(source: Any) -> Any:
    variable = variable_of(source)
    return variable.kept if isinstance(variable, ShardedVariable) else source


def _watch_variable(original: Callable[..., Any]) -> Callable[..., Any]:
    """A tape that is to watch the value of a divided weight watches the part that is kept."""

    @functools.wraps(original)
    def watch(self: object, tensor: Structure) -> object:
        return original(self, tf.nest.map_structure(_kept, tensor))

    return watch


def _refuse_divided(original: Callable[..., Any]) -> Callable[..., Any]:
    """A Jacobian of a process's part would be taken for that of the whole weight."""

    @functools.wraps(original)
    def jacobian(
        self: object, target: object, sources: Structure, *args: object, **kwargs: object
    ) -> object:
        _refuse_parts(sources)
        for each in map(variable_of, tf.nest.flatten(sources)):
            if isinstance(each, ShardedVariable):
                raise ConfigError(
                    f"{asked(tf.distribute.get_strategy())} conflicts with tape.jacobian of "
                    f"{each.path!r}, which is divided over the processes. Take the gradient of a "
                    "number (tape.gradient), or leave the option out."
                )
        return original(self, target, sources, *args, **kwargs)

    return jacobian


def _refuse_parts(sources: Structure) -> None:
    """Refuses gradients of tensors in whose place a process computes with its part."""
    strategy: Strategy = tf.distribute.get_strategy()
    if getattr(strategy, "parted", None) is None or tf.distribute.in_cross_replica_context():
        return
    for each in tf.nest.flatten(sources):
        if is_symbolic(each) and part_behind(strategy.link(MODEL), each) is not None:
            raise ConfigError(
                f"{asked(strategy)} conflicts with a gradient of {each.name!r}, the outputs of a "
                "layer that is divided, or a weight's value: what follows is computed from parts "
                "of it. Ask for the gradients of the model's inputs or of its variables "
                "(model.trainable_variables), or set rules (--layouts) that leave that layer out."
            )
