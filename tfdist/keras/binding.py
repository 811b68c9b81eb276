"""A model belongs to the strategy in whose scope it was made, also after the scope is left.

The usual program opens the scope around the making of the model only, and calls `fit` and `save`
outside of it. Models made in a scope therefore enter it again in the methods below, so that Keras
is hooked while they run. Variables that a step changes must be made in the scope as well: those of
another strategy would be updated on one replica only, or not at all.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import TensorFlowTrainer, Trainer
from tfdist.errors import ConfigError
from tfdist.keras.hooks import Hook
from tfdist.keras.model_optimizers import optimizers_of
from tfdist.sharding.variables import ShardedVariable
from tfdist.types import Metric, Model, Strategy

#: Methods of a model that run in its strategy's scope.
METHODS = (
    "compile",
    "evaluate",
    "export",
    "fit",
    "load_weights",
    "predict",
    "predict_on_batch",
    "save",
    "save_weights",
    "test_on_batch",
    "train_on_batch",
)


def hooks() -> list[Hook]:
    """The seams at which a model learns of its strategy and a call asks for its compilation."""
    return [
        Hook(TensorFlowTrainer, "__init__", _bind),
        Hook(Trainer, "_assert_compile_called", _made_in_scope),
    ]


def _bind(original: Callable[..., None]) -> Callable[..., None]:
    """A method that is called after the scope would train without the strategy."""

    @functools.wraps(original)
    def init(self: Model, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        strategy = tf.distribute.get_strategy()
        for name in METHODS:
            if hasattr(type(self), name):
                object.__setattr__(self, name, _in_scope(self, name, strategy))

    return init


def _in_scope(model: Model, name: str, strategy: Strategy) -> Callable[..., Any]:
    method = getattr(type(model), name)

    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> Any:
        with strategy.scope():
            return getattr(type(model), name)(model, *args, **kwargs)

    return call


def _made_in_scope(original: Callable[..., None]) -> Callable[..., None]:
    """Replicas do not share the variables of what was made outside of the scope."""

    @functools.wraps(original)
    def assert_compile_called(self: Model, method_name: str | None = None) -> None:
        original(self, method_name)
        trains = method_name in ("fit", "train_on_batch")
        if (self.train_function if trains else self.test_function) is not None:
            return  # Checked before that was made; `compile` drops it.
        if trains and not tf.distribute.has_strategy():
            raise ConfigError(_on_other_thread(method_name))
        strategy = tf.distribute.get_strategy()
        for owner in _made_elsewhere(self, strategy, trains):
            raise ConfigError(
                f"{owner} was made outside of strategy.scope(), which conflicts with "
                f"`{method_name}` on {type(strategy).__name__}: the replicas do not share its "
                "variables. Make it inside of `with strategy.scope():`, as the model, or run the "
                "script unchanged by `tfdist run --strategy ...`, where all of it is inside."
            )

    return assert_compile_called


def _on_other_thread(method_name: str | None) -> str:
    """Keras is hooked, so a scope is open, but not on the thread that trains."""
    return (
        f"`{method_name}` was called on thread {threading.current_thread().name!r}, on which no "
        "strategy is active: each process would train all of the data by itself. Scopes of "
        "`tf.distribute` hold on the thread that opened them. Begin what the thread runs, the "
        "making of the model included, by `with tfdist.strategy().scope():`."
    )


def _made_elsewhere(model: Model, strategy: Strategy, trains: bool) -> Iterator[str]:
    """All that a training or test step changes and that was not made in the strategy's scope."""
    for optimizer in optimizers_of(model) if trains else []:
        if optimizer._distribution_strategy is not strategy:
            yield f"The optimizer {optimizer.name!r}"
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return  # No replica has a copy of its own; a pipeline moves weights to its stages itself.
    made_here = strategy.extended.variable_created_in_scope
    weights = [v for v in model.trainable_variables if not isinstance(v, ShardedVariable)]
    for variable in weights if trains else []:
        if not made_here(variable.value):
            yield f"The model {model.name!r}, or its layer with {variable.path!r},"
    for metric in (*_compiled_metrics(model), *model.metrics):
        if not all(made_here(variable.value) for variable in metric.variables):
            yield f"The metric {metric.name!r}"


def _compiled_metrics(model: Model) -> list[Metric]:
    """The metrics in the arguments of `compile`, which Keras lists after the first batch only."""
    compiled = model._compile_metrics
    if compiled is None:
        return []
    arguments = (compiled._user_metrics, compiled._user_weighted_metrics)
    return [m for m in keras.tree.flatten(arguments) if isinstance(m, keras.metrics.Metric)]
