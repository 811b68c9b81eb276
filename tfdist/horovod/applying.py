"""How an optimizer applies averaged gradients: after one backward pass or several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras.src import backend

from tfdist.errors import ConfigError
from tfdist.horovod.averaging import Averager
from tfdist.keras.flags import Flag

__all__ = ["Applier", "applier_of", "average_before_scaling", "averaged"]

#: Up where gradients are applied that have been averaged already.
averaged = Flag()

Apply = Callable[[list[Any]], None]


class Applier:
    """Averages gradients and hands them on.

    Args:
        averager: averages them.
        passes: the number of backward passes whose gradients are added up before.
        average_passes: divides the sum by `passes`.

    Attributes:
        counter: a variable that counts the passes since the last update; None before the first.
    """

    def __init__(self, averager: Averager, passes: int, average_passes: bool) -> None:
        self.averager = averager
        self.passes = passes
        self._factor = 1 / passes if average_passes else 1.0
        self._sums: dict[int, Any] = {}
        self.counter: Any = None

    def __call__(
        self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], apply: Apply
    ) -> None:
        """Applies the averages of gradients, or adds them to those of the passes before.

        Args:
            optimizer: what counts the passes.
            grads: this process's gradients.
            variables: what they are of.
            apply: applies the averages.
        """
        if self.passes == 1:
            with averaged.up():
                apply(self.averager(grads, variables))
            return
        sums = self._add(list(grads), variables)

        def update() -> None:
            scaled = [None if s is None else s * tf.cast(self._factor, s.dtype) for s in sums]
            with averaged.up():
                apply(self.averager(scaled, variables))
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            self.counter.assign(0)

        def wait() -> None:
            optimizer._iterations.assign_add(1)

        tf.cond(tf.equal(self.counter, self.passes), update, wait)

    def _add(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds gradients to the sums, which are variables, and returns these."""
        sums = []
        for grad, variable in zip(grads, variables, strict=True):
            if isinstance(grad, tf.IndexedSlices):
                if not self.averager.settings.sparse_as_dense:
                    raise ConfigError(
                        f"backward_passes_per_step={self.passes} adds up gradients, and that of "
                        f"{variable.name!r} is sparse. Add sparse_as_dense=True."
                    )
                grad = tf.convert_to_tensor(grad)
            sums.append(None if grad is None else self._sum_of(grad, variable))
        if self.counter is None:
            with tf.init_scope():
                self.counter = tf.Variable(0, trainable=False, name="collected_passes")
        for grad, total in zip(grads, sums, strict=True):
            if total is not None:
                total.assign_add(tf.convert_to_tensor(grad))
        self.counter.assign_add(1)
        return sums

    def _sum_of(self, grad: Any, variable: Any) -> Any:
        if id(variable) not in self._sums:
            shape, dtype = variable.shape, grad.dtype
            with tf.init_scope():
                zeros = tf.zeros(shape, dtype)
                self._sums[id(variable)] = tf.Variable(zeros, trainable=False, name="collected")
        return self._sums[id(variable)]


def applier_of(optimizer: Any) -> Applier | None:
    """What averages the gradients that an optimizer is given, if it has been distributed."""
    found = getattr(optimizer, "_tfdist_applier", None)
    return found if isinstance(found, Applier) else None


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes an optimizer's variables, as Keras does with the first gradients."""
    if not optimizer.built:
        with backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True


def average_before_scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets dynamic loss scaling look for infinities in averages, which all processes have alike.

    One that found infinities in its own gradients would skip an update in which the others wait for
    it.
    """

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        applier = applier_of(self.inner_optimizer)
        if applier is None or averaged.is_up:
            return original(self, grads, trainable_variables)
        variables = list(trainable_variables or self._trainable_variables)
        build(self, variables)
        applier(
            self.inner_optimizer, list(grads), variables, lambda g: original(self, g, variables)
        )
        return None

    return apply
