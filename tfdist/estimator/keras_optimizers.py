"""Keras's optimizers in a graph: their update as a function of values, and its result applied.

Under TensorFlow Keras's optimizers assign to variables as they go, which a graph without automatic
control dependencies does not keep in order. `_Pure` puts the backend-independent methods of Keras
back in a subclass, so that all of them go through `keras.StatelessScope`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import BaseOptimizer, to_snake_case
from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.errors import ConfigError
from tfdist.estimator.keras_variables import GraphVariables, Pairs
from tfdist.types import Gradient, KerasVariable, Operation, Optimizer, Strategy, Tensor, Variable

__all__ = ["GraphOptimizer"]

tf1 = tf.compat.v1


class _Pure(BaseOptimizer):  # type: ignore[misc]
    """Comes before a class of Keras's optimizers and leaves no effect outside of Keras's scopes."""

    _var_key = BaseOptimizer._var_key
    assign = BaseOptimizer.assign
    assign_add = BaseOptimizer.assign_add
    assign_sub = BaseOptimizer.assign_sub
    stateless_apply = BaseOptimizer.stateless_apply
    _apply_weight_decay = BaseOptimizer._apply_weight_decay
    _overwrite_model_variables_with_average_value = (
        BaseOptimizer._overwrite_model_variables_with_average_value
    )

    def add_variable_from_reference(
        self,
        reference_variable: KerasVariable,
        name: str | None = None,
        initializer: object = "zeros",
    ) -> KerasVariable:
        """Makes a variable as Keras does, and notes which weight it belongs to."""
        made = BaseOptimizer.add_variable_from_reference(
            self, reference_variable, name, initializer
        )
        self.__dict__.setdefault("owners", {})[id(made)] = id(reference_variable)
        return made

    def _backend_update_step(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[KerasVariable],
        learning_rate: Tensor,
    ) -> None:
        """Updates each weight where it is, such as on its parameter server."""
        devices = self.__dict__.get("devices", {})
        for grad, variable in zip(grads, trainable_variables, strict=True):
            with tf1.device(devices.get(id(variable), "")):
                _plainly(type(self).update_step, self, grad, variable, learning_rate)

    def _backend_apply_gradients(
        self, grads: Sequence[Gradient], trainable_variables: Sequence[KerasVariable]
    ) -> None:
        """As Keras's, without conditionals: an update that is not due is computed and not taken."""
        steps = self.gradient_accumulation_steps
        if steps:
            self._accumulate(list(grads), list(trainable_variables), steps)
        else:
            self._update(grads, trainable_variables)
        if not self.use_ema:
            return
        self._update_model_variables_moving_average(self._trainable_variables)
        if self.ema_overwrite_frequency:
            due = tf.equal((self.iterations + 1) % self.ema_overwrite_frequency, 0)
            averages = self._model_variables_moving_average
            for variable, average in zip(self._trainable_variables, averages, strict=True):
                variable.assign(tf.where(due, average.value, variable.value))

    def _update(self, grads: Sequence[Gradient], variables: Sequence[KerasVariable]) -> None:
        grads = self._clip_gradients(grads)
        self._apply_weight_decay(variables)
        self._backend_update_step(grads, variables, self.learning_rate)

    def _accumulate(self, grads: list[Any], variables: list[Any], steps: int) -> None:
        due = tf.equal((self._iterations + 1) % steps, 0)
        sums = [self._accumulated_gradients[self._get_variable_index(v)] for v in variables]
        totals = [grad + total.value for grad, total in zip(grads, sums, strict=True)]
        every = [*variables, *self.variables]
        before = [variable.value for variable in every]
        self._update([total / steps for total in totals], variables)
        for variable, old in zip(every, before, strict=True):
            variable.assign(tf.where(due, variable.value, old))
        for kept, total in zip(sums, totals, strict=True):
            kept.assign(tf.where(due, tf.zeros_like(total), total))


def _plainly(method: Callable[..., Any], *args: Any) -> None:
    """Calls a method of Keras without the hook that a strategy's scope may have put in its place.

    `tfdist run` opens such a scope around the whole script.
    """
    inspect.unwrap(method)(*args)


class GraphOptimizer:
    """An optimizer of Keras for variables of the default graph.

    Args:
        optimizer: Keras's.
        references: Keras variables that stand for the weights.
        weights: for each the graph's.
        prefix: is put before the names of the optimizer's own variables.
        compiled: whether it is that of a compiled model. It then goes on from its state, and losses
            have been divided by the number of replicas.

    Attributes:
        own: its own variables.

    Raises:
        ConfigError: for an optimizer that scales losses.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        references: Sequence[Any],
        weights: Sequence[Any],
        *,
        prefix: str = "",
        compiled: bool = False,
    ) -> None:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} is not supported by Estimators. Give the optimizer "
                "inside of it, and train in float32 or bfloat16."
            )
        self._pure = _pure(optimizer, references, compiled)
        kinds = tf.distribute.ReduceOp
        self._reduce = kinds.SUM if compiled else kinds.MEAN
        self._references, self._weights = list(references), list(weights)
        devices = {id(one): w.device for one, w in zip(references, weights, strict=True)}
        owners = self._pure.__dict__.get("owners", {})
        self._pure.__dict__["devices"] = devices
        self.own = GraphVariables(
            self._pure.variables,
            prefix=prefix,
            devices=[devices.get(owners.get(id(v)), "") for v in self._pure.variables],
        )

    def minimize(
        self, loss: Tensor, sources: Sequence[Any], step: Variable | None, more: Sequence[Any] = ()
    ) -> Operation:
        """The op of one update.

        Args:
            loss: a scalar tensor.
            sources: for each weight the tensor or variable by which the loss is differentiated.
            step: a variable that the op adds one to, or None.
            more: other ops that are a part of it.
        """
        scaled = self._pure.scale_loss(loss)  # For `loss_scale_factor`.
        updates = [self._apply(tf1.gradients(scaled, list(sources))), *more]
        if step is None:
            return tf.group(*updates)
        with tf.control_dependencies(updates), tf1.device(step.device):
            return step.assign_add(1, read_value=False)

    def _apply(self, grads: Sequence[Any]) -> Operation:
        """The op that applies gradients, dense, sparse or None."""
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync == 1:
            # Sparse ones stay sparse: of rows that come twice, Keras makes something else.
            return self._updated(list(grads), self._weights, self.own.graph)
        dense = [tf.convert_to_tensor(grad) for grad in grads if grad is not None]
        weights = [w for w, grad in zip(self._weights, grads, strict=True) if grad is not None]
        if len(dense) < len(grads):
            raise ConfigError(
                f"The loss does not depend on {len(grads) - len(dense)} of the model's weights, "
                "which several replicas cannot train. Set trainable=False on their layers."
            )
        return context.merge_call(self._on_replicas, args=(dense, weights))

    def _on_replicas(self, strategy: Strategy, grads: list[Any], weights: list[Any]) -> Operation:
        """Updates each replica's copy of the variables by the gradients of all."""
        reduced = strategy.extended.batch_reduce_to(
            self._reduce, list(zip(grads, weights, strict=True))
        )
        ops = []
        for i, device in enumerate(strategy.extended.worker_devices):
            parts = [
                [strategy.experimental_local_results(each)[i] for each in values]
                for values in (reduced, self._weights, self.own.graph)
            ]
            with tf1.device(device):
                ops.append(self._updated(*parts))
        return tf.group(*ops)

    def _updated(self, grads: list[Any], weights: Sequence[Any], own: Sequence[Any]) -> Operation:
        """The op that updates weights and the optimizer's own variables."""
        # Read only now: another worker may have changed the weights since the forward pass.
        pairs = Pairs([*self._references, *self.own.keras], [*weights, *own])
        with tf.control_dependencies([grad for grad in grads if grad is not None]):
            before = pairs.read()
        with keras.StatelessScope(before, initialize_variables=False) as scope:
            _plainly(BaseOptimizer.apply, self._pure, grads)
        return tf.group(*pairs.assigned(before, scope))


def _pure(optimizer: Optimizer, references: Sequence[Any], with_state: bool) -> _Pure:
    """A copy of an optimizer that leaves no effect, built for Keras variables."""
    kind = type(optimizer)
    with eagerly_outside_of_scope():
        # Keras numbers names through, but the next process must find the variables again.
        config = {**optimizer.get_config(), "name": to_snake_case(kind.__name__)}
        rate = optimizer._learning_rate
        if not isinstance(rate, keras.Variable):  # A schedule, which need not be serializable.
            config["learning_rate"] = rate
        made: Any = type(kind.__name__, (_Pure, kind), {})
        pure = made.from_config(config)
        _exclude_as(optimizer, pure, references)
        pure.build(list(references))
        if with_state and optimizer.built:
            for own, other in zip(pure.variables, optimizer.variables, strict=True):
                own.assign(other.value)
    return pure


def _exclude_as(optimizer: Optimizer, pure: Optimizer, references: Sequence[Any]) -> None:
    """Leaves the same weights out of weight decay."""
    excluded: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    if excluded or pattern:
        pure.exclude_from_weight_decay(
            var_list=[each for each in references if optimizer._var_key(each) in excluded],
            var_names=[pattern.pattern] if pattern else None,
        )
