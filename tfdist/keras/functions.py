"""Functions that a program compiles by itself (`tf.function`) and calls within a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import types
from tfdist._tf.graphs import Function, TfMethodTarget, called_in_line
from tfdist.keras.hooks import Hook, is_of_program
from tfdist.keras.replica_context import current_step
from tfdist.utils.messages import warn

__all__ = ["as_method", "hooks", "in_line"]


def hooks() -> list[Hook]:
    """The seam at which a compiled function is called."""
    return [Hook(Function, "__call__", partial(in_line, _is_in_step))]


def in_line(
    joins: Callable[[types.Function], bool], original: Callable[..., object]
) -> Callable[..., object]:
    """A call hides what a function does with a step's examples, so its ops join the step's."""

    @wraps(original)
    def call(self: types.Function, *args: object, **kwargs: object) -> object:
        if tf.executing_eagerly() and _is_of_eager_step(self):
            return self.python_function(*args, **kwargs)
        if tf.executing_eagerly() or not joins(self):
            return original(self, *args, **kwargs)
        if self._jit_compile:
            _warn_of_xla(self)
        signature = self.input_signature
        specs = signature if signature and len(signature) == len(args) else args
        args = tuple(tf.nest.map_structure(_as_argument, args, specs))
        kwargs = tf.nest.map_structure(_as_argument, kwargs)
        return tf.nest.map_structure(_as_result, called_in_line(self, *args, **kwargs))

    return call


def _is_of_eager_step(function: types.Function) -> bool:
    """Whether a step that runs eagerly calls a function of the program, which runs so as well.

    Compiled, it would keep the sizes of the batch that it was traced with. Replicas of one process
    take turns, and its collectives would wait for one whose turn has not come.
    """
    if current_step() is None:
        return False
    inner = function.python_function
    of_tensorflow = str(getattr(inner, "__module__", "")).startswith("tensorflow.")
    return is_of_program(inner) and not of_tensorflow


def as_method(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls `fn`, if that is a `tf.function` made of a method; else `fn` itself."""
    if not isinstance(fn, Function):
        return fn
    owner = getattr(getattr(fn, "__wrapped__", fn.python_function), "__self__", None)
    owner = owner.target if isinstance(owner, TfMethodTarget) else owner

    # Without the attribute that names what TensorFlow decorated, which AutoGraph changes in place.
    @wraps(fn.python_function, updated=())
    def method(_: object, *args: object, **kwargs: object) -> object:
        return fn(*args, **kwargs)

    return fn if owner is None else MethodType(method, owner)


def _is_in_step(function: types.Function) -> bool:
    """Whether a replica's step is being traced, which a function for XLA joins as well.

    It does if there is something to exchange, which XLA cannot compile: with other replicas, or
    parts of weights and layers with other processes, also in a prediction.
    """
    step = current_step()
    if not function._jit_compile:
        return step is not None
    strategy = tf.distribute.get_strategy()
    divided = getattr(strategy, "parted", None) is not None or getattr(strategy, "zero", 0) == 3
    return divided or (step is not None and not step.is_whole)


def _warn_of_xla(function: types.Function) -> None:
    name = getattr(function.python_function, "__name__", "a function")
    warn(
        f"{name!r} is made with tf.function(jit_compile=True) and called within a step that "
        "exchanges tensors with other replicas or processes, which XLA cannot compile. It runs as "
        "a part of the step, without XLA: the results are the same, the speed may not be."
    )


def _as_argument(value: object, spec: object = None) -> object:
    """A function gets tensors in place of NumPy's arrays; of Python's numbers by its signature."""
    if isinstance(spec, tf.TensorSpec):
        return tf.convert_to_tensor(value, spec.dtype)
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray | np.generic) else value


def _as_result(value: object) -> object:
    """A function returns tensors in place of numbers and variables."""
    numbers = bool | int | float | complex | str | bytes | np.ndarray | np.generic | tf.Variable
    return tf.convert_to_tensor(value) if isinstance(value, numbers) else value
