"""Names that optimizers had in Keras 2, for programs that were written with them.

Functions that Keras 3 computes otherwise are not imitated: docs/horovod_migration.md has their
replacements.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.horovod.averaging import Applier, applier_of, averaged
from tfdist.types import Callback, Gradient, GradientTape, KerasVariable, Scalar, Tensor

__all__ = ["OldNames", "old_arguments"]


class _Averages(list[tuple[Any, Any]]):
    """Pairs of an averaged gradient and its variable, which are not averaged again."""


class OldNames:
    """Names of Keras 2 on a distributed optimizer."""

    learning_rate: Scalar
    _tfdist_pairs_given = False

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
        object.__setattr__(self, "_tfdist_pairs_given", True)
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
        if self._tfdist_pairs_given:
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
            return dense(tf.convert_to_tensor(gradient), own, None)
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


def old_arguments(original: Callable[..., None]) -> Callable[..., None]:
    """Lets optimizers take `lr`, and subclasses of the program leave the learning rate out."""

    @functools.wraps(original)
    def begin(self: Callback, *args: object, **kwargs: object) -> None:
        if "lr" in kwargs:
            _warn(f"{type(self).__name__}(lr=...) is Keras 2's; write learning_rate=...")
            args, kwargs = args[1:], {**kwargs, "learning_rate": kwargs["lr"]}
            del kwargs["lr"]
        elif isinstance(args[0] if args else None, str):
            # The first argument of Keras 2's base class is the name.
            args, kwargs = args[1:], {"name": args[0], **kwargs}
        if not args and "learning_rate" not in kwargs:
            kwargs["learning_rate"] = 0.0  # The subclass does not use it.
        original(self, *args, **kwargs)

    return begin


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
