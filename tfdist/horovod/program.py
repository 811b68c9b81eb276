"""A Horovod program's start and end, and the changes of Keras in between.

XLA cannot compile Horovod's operations, and Keras chooses it by itself on GPUs; dynamic loss
scaling looks at gradients before they are averaged; and programs that were written for Keras 2
use a few forms that Keras 3 refuses. From `init` to `shutdown` Keras gets along with that.
Functions that Keras 3 computes otherwise are not imitated: docs/horovod_migration.md has their
replacements.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist._keras import BaseOptimizer, LossScaleOptimizer, Trainer, unwrapped
from tfdist.errors import ConfigError
from tfdist.horovod.averaging import Applier, applier_of, average_before_scaling, averaged
from tfdist.keras.hooks import PROGRAM, Hook, HookSet
from tfdist.strategies.horovod.library import load
from tfdist.types import Callback, Gradient, GradientTape, KerasVariable, Model, Scalar, Tensor
from tfdist.utils.messages import warn

__all__ = ["OldNames", "adapt_keras", "hooks", "init", "shutdown"]

#: The optimizers that programs name as `keras.optimizers.legacy.Adam` and the like.
_LEGACY = ("Adagrad", "Adam", "Ftrl", "RMSprop", "SGD")

#: The position of `jit_compile` among the arguments of `compile`.
_JIT_POSITION = 7


def hooks() -> list[Hook]:
    """The seams of Keras that a Horovod program needs."""
    legacy = keras.optimizers.legacy
    return [
        Hook(Trainer, "compile", _for_horovod),
        Hook(LossScaleOptimizer, "apply", average_before_scaling),
        Hook(LossScaleOptimizer, "variables", _called_or_not),
        Hook(BaseOptimizer, "variables", _called_or_not),
        Hook(BaseOptimizer, "__init__", _old_arguments),
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
            warn("compile(experimental_run_tf_function=...) is Keras 2's and has no effect.")
        if len(args) <= _JIT_POSITION:
            chosen = kwargs.get("jit_compile", "auto")
            optimizer = args[0] if args else kwargs.get("optimizer")
            if chosen is True and _exchanges(optimizer):
                warn(
                    "jit_compile=True does not go with hvd.DistributedOptimizer: XLA cannot "
                    "compile Horovod's operations. The model is compiled with jit_compile=False."
                )
                chosen = False
            kwargs["jit_compile"] = False if chosen == "auto" else chosen
        original(self, *args, **kwargs)

    return compile_model


def _exchanges(optimizer: object) -> bool:
    """Whether an optimizer averages its gradients by Horovod."""
    return isinstance(optimizer, BaseOptimizer) and applier_of(unwrapped(optimizer)) is not None


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
        warn(
            f"keras.optimizers.legacy.{name} is Keras 2's. In its place is "
            f"keras.optimizers.{name}; write that."
        )
        return getattr(keras.optimizers, name)(*args, **kwargs)

    return make


class _Averages(list[tuple[Any, Any]]):
    """Pairs of an averaged gradient and its variable, which are not averaged again."""


class OldNames:
    """Names of Keras 2 on a distributed optimizer."""

    learning_rate: Scalar
    _tfdist_pairs_averaged = False

    @property
    def lr(self) -> Scalar:
        """The learning rate."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Scalar) -> None:
        self.learning_rate = value

    @property
    def _agg_helper(self) -> Applier:
        result = applier_of(self)
        assert result is not None
        return result

    def _compute_gradients(
        self,
        loss: Tensor | Callable[[], Tensor],
        var_list: Sequence[KerasVariable] | Callable[[], Sequence[KerasVariable]],
        grad_loss: Tensor | None = None,
        tape: GradientTape | None = None,
    ) -> list[tuple[Any, Any]]:
        """The gradients of a loss, averaged over the processes unless several passes are added up.

        Args:
            loss: a function without arguments, or a tensor that `tape` has recorded.
            var_list: variables, in any nest; or a function that gives them.
            grad_loss: the gradient of the loss.
            tape: the tape that has recorded the loss.

        Raises:
            ConfigError: if neither a function nor a tape is given.
        """
        if tape is None and not callable(loss):
            raise ConfigError(
                "_compute_gradients was given a tensor and no tape. Give tape=, which has recorded "
                "the loss, or the function that computes it."
            )
        tape = tf.GradientTape() if tape is None else tape
        if callable(loss):
            with tape:
                loss = loss()
        variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        # A distributed tape would average, too.
        grads = tf.GradientTape.gradient(tape, loss, variables, grad_loss)
        applier = self._agg_helper
        if applier.passes > 1:
            return list(zip(grads, variables, strict=True))
        object.__setattr__(self, "_tfdist_pairs_averaged", True)
        return _Averages(zip(applier.averager(grads, variables), variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], **kwargs: object
    ) -> object:
        """Applies gradients, which are averaged unless `_compute_gradients` has done so.

        Args:
            grads_and_vars: pairs of a gradient and its variable.
            **kwargs: `name` and `experimental_aggregate_gradients` of Keras 2, of no effect.

        Raises:
            ConfigError: for pairs that were made from averages, which would be averaged again.
        """
        unknown = set(kwargs) - {"name", "experimental_aggregate_gradients"}
        if unknown:
            raise TypeError(f"apply_gradients() got an unexpected argument {unknown.pop()!r}")
        if isinstance(grads_and_vars, _Averages):
            with averaged.up():
                return super().apply_gradients(grads_and_vars)  # type: ignore[misc]
        if self._tfdist_pairs_averaged:
            raise ConfigError(
                "apply_gradients was given other pairs than those that _compute_gradients of the "
                "same optimizer returned, whose gradients are averaged already. Give it these; or "
                "compute gradients with a tf.GradientTape, change them, and apply them, which "
                "averages them."
            )
        return super().apply_gradients(grads_and_vars)  # type: ignore[misc]

    def update_step(
        self, gradient: Gradient, variable: KerasVariable, learning_rate: Tensor
    ) -> object:
        """Applies one gradient, by a subclass's own method if it has one of Keras 2."""
        dense = getattr(self, "_resource_apply_dense", None)
        if dense is not None:
            own = variable.value if isinstance(variable, keras.Variable) else variable
            takes_state = "apply_state" in inspect.signature(dense).parameters
            state = {"apply_state": None} if takes_state else {}
            return dense(tf.convert_to_tensor(gradient), own, **state)
        update = super().update_step  # type: ignore[misc]
        if len(inspect.signature(update).parameters) == 2:
            return update(gradient, variable)
        return update(gradient, variable, learning_rate)

    def get_gradients(self, loss: object, params: object) -> NoReturn:
        """Rejects options that only graphs of TensorFlow 1 had.

        Raises:
            ConfigError: always.
        """
        del loss, params
        raise ConfigError(
            "optimizer.get_gradients is for graphs of TensorFlow 1, and Keras 3 has none. Use "
            "tf.GradientTape and optimizer.apply_gradients, which averages."
        )


def _old_arguments(original: Callable[..., None]) -> Callable[..., None]:
    """Lets optimizers take `lr`, and subclasses of the program leave the learning rate out."""

    @functools.wraps(original)
    def begin(self: Callback, *args: object, **kwargs: object) -> None:
        if "lr" in kwargs:
            warn(f"{type(self).__name__}(lr=...) is Keras 2's; write learning_rate=...")
            args, kwargs = args[1:], {**kwargs, "learning_rate": kwargs["lr"]}
            del kwargs["lr"]
        elif isinstance(args[0] if args else None, str):
            # The first argument of Keras 2's base class is the name.
            args, kwargs = args[1:], {"name": args[0], **kwargs}
        if not args and "learning_rate" not in kwargs:
            kwargs["learning_rate"] = 0.0  # The subclass does not use it.
        original(self, *args, **kwargs)

    return begin
