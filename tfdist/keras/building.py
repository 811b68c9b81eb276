"""Building a model under a strategy: when its first step is traced, as on one device.

Under a strategy Keras 3 builds a model from symbolic inputs before the first step, and makes those
inputs by adding up the replicas' batches. Unequal batches, string features and models whose `call`
is not usable stop there, and the data set is started once more than on one device. tfdist leaves
the build to the first step, and takes the creation of variables out of the replica's function: they
are created eagerly, in the strategy's scope, by the first replica that needs them.

A trace of an unbuilt model is not the step that Keras means. `LossScaleOptimizer.scale_loss`, for
one, puts the constant `initial_scale` into the graph until it is built. On one device the graph
that runs comes from a second trace: `tf.function` discards every trace that created variables.
Since tfdist's variables are created outside of the trace, it has to see to that itself: whatever is
not built is built by a trace into a graph that is thrown away (`on_built_model`). In a function of
the program's own, the scale of a loss is made when a loss is scaled (`scale_of`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist import types
from tfdist._keras import (
    Functional,
    KerasVariable,
    LossScaleOptimizer,
    TensorFlowTrainer,
    Trainer,
    unpack_x_y_sample_weight,
)
from tfdist._tf.distribute import outside_of_function
from tfdist.comm.batch_dependence import is_symbolic
from tfdist.keras.custom_gradients import is_known, mark_known
from tfdist.keras.hooks import Hook, is_of_program
from tfdist.keras.model_optimizers import optimizers_of
from tfdist.keras.open_batch import is_left_static, is_tried, traced_in_vain
from tfdist.keras.replica_context import static_size_of
from tfdist.types import Model, Optimizer, Structure
from tfdist.utils.messages import warn

__all__ = [
    "build_optimizer",
    "has_own_step",
    "hooks",
    "on_built_model",
    "plain_outside_of_replica",
    "scale_of",
]

#: The attribute of an optimizer for the variables of its scale that were made before it is built.
_SCALE = "_tfdist_scale"


def hooks() -> list[Hook]:
    """The seams of Keras's symbolic build and of its variables' creation."""
    return [
        Hook(TensorFlowTrainer, "_maybe_symbolic_build", _left_to_first_step),
        Hook(KerasVariable, "__init__", _outside_of_replica),
        Hook(Trainer, "compile", _without_xla),
        Hook(LossScaleOptimizer, "build", _with_scale_of_before),
    ]


def on_built_model(
    model: Model, fn: Callable[..., Any], run: Callable[[Any], Any], *, sized: bool
) -> object:
    """Runs a Keras step so that nothing in its graph stems from an unbuilt model or optimizer.

    Args:
        model: the model.
        fn: its `train_step` or `test_step`.
        run: runs `fn`, or another function of one batch, on each replica.
        sized: whether batches have a static size, without which the step is to be traced.

    Returns:
        What `run(fn)` returns.
    """
    if tf.executing_eagerly():
        return run(fn)
    name = fn.__name__
    own = name == "train_step" and (
        has_own_step(model, name) or any(map(_has_own_apply, optimizers_of(model)))
    )
    is_built = _is_built(model, fn) and (not own or is_known(model))
    # The forward pass and the gradients of a built Functional model with Keras's own step do
    # not change its state, so its loss and metrics suffice: a fraction of a whole trace.
    short = _outputs_are_known(model, sized) and not own and not has_own_step(model, name)
    if is_built and (not sized or short or is_tried(model, name)):
        return run(fn)
    if name == "train_step" and not own:
        _build_optimizer(model)
    if sized or own or not _is_built(model, fn):
        trace = functools.partial(run, functools.partial(_build_compiled, model) if short else fn)
        traced_in_vain(model, name if sized else None, trace)
    if own:
        mark_known(model)
    return run(fn)


def _is_built(model: Model, fn: Callable[..., Any]) -> bool:
    compiled = (getattr(model, name, None) for name in ("_compile_metrics", "_compile_loss"))
    optimizers = optimizers_of(model) if fn.__name__ == "train_step" else []
    parts = [*model._flatten_layers(), *optimizers, *(c for c in compiled if c is not None)]
    return all(part.built for part in parts)


def _build_optimizer(model: Model) -> None:
    """Builds the optimizer of Keras's own `train_step`, which trains all trainable weights."""
    layers_are_built = all(layer.built for layer in model._flatten_layers())
    if model.optimizer is not None and layers_are_built:
        build_optimizer(model.optimizer, model.trainable_variables)


def build_optimizer(optimizer: Optimizer, variables: list[Any]) -> None:
    """Builds an optimizer unless it is built, outside of any graph.

    Values that it assigns to its variables meanwhile are assigned once, and not in each step.
    """
    if optimizer.built:
        return
    with (
        outside_of_function(tf.distribute.get_strategy()),
        keras.name_scope(optimizer.name, caller=optimizer),
    ):
        optimizer.build(variables)
        optimizer.built = True


def scale_of(optimizer: types.LossScaler) -> KerasVariable:
    """The variable by which a graph is to multiply losses, where Keras would take a constant.

    Args:
        optimizer: an optimizer that is not built, whose `build` takes the variable over.
    """
    if _SCALE not in vars(optimizer):
        with outside_of_function(tf.distribute.get_strategy()):
            counter = optimizer.add_variable((), "zeros", "int", name="step_counter")
            start = keras.initializers.Constant(optimizer.initial_scale)
            scale = optimizer.add_variable((), start, "float32", name="dynamic_scale")
        vars(optimizer)[_SCALE] = {"step_counter": counter, "dynamic_scale": scale}
    found: KerasVariable = vars(optimizer)[_SCALE]["dynamic_scale"]
    return found


def _with_scale_of_before(original: Callable[..., None]) -> Callable[..., None]:
    """Builds an optimizer with the variables that `scale_of` has made."""

    @functools.wraps(original)
    def build(self: types.LossScaler, var_list: list[Any]) -> None:
        made = vars(self).pop(_SCALE, None)
        if made is None:
            return original(self, var_list)
        add = self.add_variable

        def add_variable(*args: Any, name: str = "", **kwargs: Any) -> KerasVariable:
            return made.pop(name) if name in made else add(*args, name=name, **kwargs)

        vars(self)["add_variable"] = add_variable
        try:
            original(self, var_list)
        finally:
            del vars(self)["add_variable"]

    return build


def has_own_step(model: Model, name: str) -> bool:
    """Whether a model's class overrides `train_step` or `test_step`."""
    return getattr(type(model), name) is not getattr(TensorFlowTrainer, name)


def _has_own_apply(optimizer: Optimizer) -> bool:
    """Whether a program's own optimizer may change gradients before Keras's `apply` sees them.

    As with a `train_step` of the program's own, that shows when the step is traced.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    methods = (getattr(type(optimizer), name) for name in ("apply", "apply_gradients"))
    return any(map(is_of_program, methods)) or (inner is not None and _has_own_apply(inner))


def _outputs_are_known(model: Model, sized: bool) -> bool:
    """Whether a model's layers have been called on placeholders; if `sized`, of an open batch."""
    graph = _graph_of(model)
    if not isinstance(graph, Functional) or not all(x.built for x in model._flatten_layers()):
        return False
    return not sized or all(each.shape[:1] in ((), (None,)) for each in graph.inputs)


def _graph_of(model: Model) -> Functional:
    """A Functional model itself; of a built Sequential one the Functional that it calls."""
    return getattr(model, "_functional", model)


def _build_compiled(model: Model, batch: Structure) -> None:
    """Builds the loss and the metrics of a model on placeholders for its outputs.

    Their first dimension is not that of the model's: `Input(batch_shape=...)` has all replicas'
    examples.
    """
    x, y, sample_weight = unpack_x_y_sample_weight(batch)
    rows = static_size_of(batch) if is_left_static(model) else None
    outputs = keras.tree.map_structure(
        lambda output: tf.compat.v1.placeholder(
            output.dtype, [rows, *output.shape[1:]] if output.shape else []
        ),
        _graph_of(model)._outputs_struct,
    )
    if model._compile_loss is not None:
        model._compile_loss(y, outputs, sample_weight)
    model.compute_metrics(x, y, outputs, sample_weight=sample_weight)


def _left_to_first_step(original: Callable[..., None]) -> Callable[..., None]:
    """Keras's symbolic build makes variables in a replica's function."""

    @functools.wraps(original)
    def maybe_symbolic_build(
        self: Model, iterator: Iterable[Any] | None = None, data_batch: Any = None
    ) -> None:
        del self, iterator, data_batch

    return maybe_symbolic_build


def _outside_of_replica(original: Callable[..., None]) -> Callable[..., None]:
    """Makes a variable, and the tensor that its value becomes, outside of the replica's graph."""

    @functools.wraps(original)
    def initialize(
        self: types.KerasVariable,
        initializer: object,
        *args: object,
        **kwargs: object,
    ) -> None:
        if tf.executing_eagerly() or tf.distribute.in_cross_replica_context():
            return original(self, initializer, *args, **kwargs)
        if tf.is_tensor(initializer):  # of the function's graph, such as zeros of an RNN's state
            initializer = _constant(initializer)
        with outside_of_function(tf.distribute.get_strategy()):
            return original(self, initializer, *args, **kwargs)

    return initialize


def plain_outside_of_replica(next_creator: Callable[..., Any], **kwargs: Any) -> types.Variable:
    """Makes a variable of TensorFlow's, as a layer's `build` may, outside of the replica's graph.

    To be called by `tf.variable_creator_scope`.
    """
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    kwargs["initial_value"] = initial = _constant(kwargs.get("initial_value"))
    of_graph = is_symbolic(initial)
    if tf.executing_eagerly() or tf.distribute.in_cross_replica_context() or of_graph:
        return next_creator(**kwargs)
    with outside_of_function(tf.distribute.get_strategy()):
        return tf.Variable(**kwargs)


def _constant(value: Any) -> Any:
    """The value of a tensor of a graph if it does not depend on the batch, else the tensor."""
    static = tf.get_static_value(value) if tf.is_tensor(value) else None
    return value if static is None else static


def _without_xla(original: Callable[..., None]) -> Callable[..., None]:
    """Leaves XLA off if a step exchanges tensors, and reports that (keras#18716)."""

    @functools.wraps(original)
    def compile_model(self: Model, *args: object, **kwargs: object) -> None:
        strategy = tf.distribute.get_strategy()
        replicas = strategy.num_replicas_in_sync
        exchange = None
        if replicas > 1:
            exchange = f"{replicas} replicas: XLA cannot compile the exchange of their gradients"
        elif getattr(strategy, "parted", None) is not None:
            exchange = f"mesh='{strategy.mesh}': XLA cannot compile the exchange of parts of layers"
        if kwargs.get("jit_compile") is True and exchange is not None:
            warn(
                f"jit_compile=True does not go with {exchange}. The model is compiled with "
                "jit_compile=False."
            )
            kwargs["jit_compile"] = False
        original(self, *args, **kwargs)

    return compile_model
