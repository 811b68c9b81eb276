"""A Horovod program's start and end, and the changes of Keras in between.

XLA cannot compile Horovod's operations, and Keras chooses it by itself on GPUs; dynamic loss
scaling looks at gradients before they are averaged; and programs that were written for Keras 2
use a few forms that Keras 3 refuses. From `init` to `shutdown` Keras gets along with that.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras

from tfdist._keras import BaseOptimizer, LossScaleOptimizer, Trainer
from tfdist.horovod.averaging import applier_of, average_before_scaling
from tfdist.horovod.keras2 import old_arguments
from tfdist.keras.hooks import PROGRAM, Hook, HookSet
from tfdist.strategies.horovod.library import load
from tfdist.types import Model

__all__ = ["adapt_keras", "hooks", "init", "shutdown"]

#: The optimizers that programs name as `keras.optimizers.legacy.Adam` and the like.
_LEGACY = ("Adagrad", "Adam", "Ftrl", "RMSprop", "SGD")

#: The position of `jit_compile` among the arguments of `compile`.
_PLACE_OF_JIT = 7


def hooks() -> list[Hook]:
    """The seams of Keras that a Horovod program needs."""
    legacy = keras.optimizers.legacy
    return [
        Hook(Trainer, "compile", _for_horovod),
        Hook(LossScaleOptimizer, "apply", average_before_scaling),
        Hook(LossScaleOptimizer, "variables", _called_or_not),
        Hook(BaseOptimizer, "variables", _called_or_not),
        Hook(BaseOptimizer, "__init__", old_arguments),
        *[Hook(legacy, name, functools.partial(_of_today, name)) for name in _LEGACY],
    ]


_hooks = HookSet(hooks, PROGRAM)


def init(*args: object, **kwargs: object) -> None:
    """Makes this process a member of the job: Horovod's own `init`, with the same arguments."""
    load().init(*args, **kwargs)
    adapt_keras()


def shutdown() -> None:
    """Leaves the job, and puts Keras back as it was."""
    try:
        load().shutdown()
    finally:
        if _hooks.installed:
            _hooks.leave()


def adapt_keras() -> None:
    """Hooks Keras, unless it has been hooked already."""
    if not _hooks.installed:
        _hooks.enter()


def _for_horovod(original: Callable[..., None]) -> Callable[..., None]:
    """Leaves XLA off, and drops an argument of Keras 2 that Horovod's examples give."""

    @functools.wraps(original)
    def compile_model(self: Model, *args: object, **kwargs: object) -> None:
        if "experimental_run_tf_function" in kwargs:
            del kwargs["experimental_run_tf_function"]
            _warn("compile(experimental_run_tf_function=...) is Keras 2's and has no effect.")
        if len(args) <= _PLACE_OF_JIT:
            chosen = kwargs.get("jit_compile", "auto")
            given = args[0] if args else kwargs.get("optimizer")
            if chosen is True and applier_of(getattr(given, "inner_optimizer", given)) is not None:
                _warn(
                    "jit_compile=True does not go with hvd.DistributedOptimizer: XLA cannot "
                    "compile Horovod's operations. The model is compiled with jit_compile=False."
                )
                chosen = False
            kwargs["jit_compile"] = False if chosen == "auto" else chosen
        original(self, *args, **kwargs)

    return compile_model


def _called_or_not(original: property) -> property:
    """Lets `optimizer.variables()` of Keras 2 mean `optimizer.variables`."""
    return property(lambda self: _Callable(original.fget(self)))  # type: ignore[misc]


class _Callable(list[Any]):
    """A list that gives itself when it is called."""

    def __call__(self) -> _Callable:
        return self


def _of_today(name: str, original: type) -> Callable[..., Any]:
    """Keras 3 names the optimizers of Keras 2 only to refuse them."""
    del original  # It only reports that Keras 3 does not have it.

    def make(*args: object, **kwargs: object) -> object:
        _warn(
            f"keras.optimizers.legacy.{name} is Keras 2's. In its place is "
            f"keras.optimizers.{name}; write that."
        )
        return getattr(keras.optimizers, name)(*args, **kwargs)

    return make


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)
