"""Horovod's Keras callbacks, for Keras 3."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._keras import unwrapped
from tfdist.errors import ConfigError
from tfdist.horovod.averaging import build, initialized, refuse_strategy, ring_of
from tfdist.horovod.values import broadcast_variables
from tfdist.types import Logs, Model, Optimizer, Scalar

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class _Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback of a process of a Horovod job."""

    @property
    def _who(self) -> str:
        return f"hvd.callbacks.{type(self).__name__}"

    def set_model(self, model: Model) -> None:
        """Refuses a model whose strategy does the same."""
        initialized(self._who)
        refuse_strategy(self._who)
        super().set_model(model)


class BroadcastGlobalVariablesCallback(_Callback):
    """Starts training with the same state on all processes.

    Before the first batch of each `fit`, all processes get the model's weights, trainable or not,
    and its optimizer's variables from one: also the learning rate and the number of updates. States
    of random generators stay each process's own, and so do metrics. Variables that only the first
    batch creates are sent after it: a model that is not built, and optimizers under other names.

    Args:
        root_rank: the process whose state all get.
        device: where it is sent; empty for where it is.
        local_variables: variables that stay each process's own.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        single = isinstance(local_variables, keras.Variable | tf.Variable)
        self._local = {id(v) for v in ([local_variables] if single else local_variables or ())}
        self._waiting: list[str] = []

    def register_local_var(self, variable: object) -> None:
        """Leaves a variable to each process."""
        self._local.add(id(variable))

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Notes the values to be sent."""
        self._waiting = ["weights", *self._optimizers()]

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Sends the values that are there before the first batch, if they are on all processes."""
        if self._waiting and self._is_built_everywhere():
            if getattr(self.model, "optimizer", None) is not None:
                build(self.model.optimizer, self.model.trainable_variables)
            self._send("weights", "optimizer")

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Sends the values that the first batch has made."""
        if self._waiting:
            self._send(*self._waiting)

    def _optimizers(self) -> list[str]:
        """The names of the model's attributes that are optimizers."""
        kind = keras.optimizers.Optimizer
        others = sorted(name for name in vars(self.model) if name != "optimizer")
        return [n for n in ("optimizer", *others) if isinstance(getattr(self.model, n, None), kind)]

    def _is_built_everywhere(self) -> bool:
        ring = ring_of()
        built = int(self.model.built)
        return bool(built) if ring is None else int(ring.sum([tf.constant(built)])[0]) == ring.size

    def _send(self, *names: str) -> None:
        variables = []
        for name in names:
            if name in self._waiting:
                self._waiting.remove(name)
                weights = name == "weights"
                variables += self.model.weights if weights else getattr(self.model, name).variables
        with tf.device(self.device):
            broadcast_variables([v for v in variables if id(v) not in self._local], self.root_rank)


class MetricAverageCallback(_Callback):
    """Replaces the logs of each epoch by their averages over all processes.

    Callbacks that come after it in the list, Keras's progress bar and `History` see the averages;
    those before it see the process's own. Logs that only some processes have stay as they are.

    Args:
        device: accepted, of no effect.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages the logs."""
        if logs is None or ring_of() is None:
            return
        everyone = initialized(self._who).allgather_object(dict(logs), name="tfdist.logs")
        for name in set.intersection(*[set(each) for each in everyone]):
            average = np.mean([np.asarray(each[name], "float64") for each in everyone], axis=0)
            logs[name] = float(average) if average.ndim == 0 else average


class LearningRateScheduleCallback(_Callback):
    """Multiplies the learning rate in some epochs.

    In the epochs from `start_epoch` to `end_epoch` the learning rate is `initial_lr * multiplier`,
    as Horovod documents and its examples use it. (Horovod 0.28's own code takes a number to the
    power of the epochs that have passed.)

    Args:
        initial_lr: the learning rate to multiply.
        multiplier: a number, or a function of the epoch.
        start_epoch: the first epoch in which it applies.
        end_epoch: the first in which it applies no more; never by default.
        staircase: sets the learning rate at the start of each epoch; else before each batch, and
            `multiplier` is given a fraction, `epoch + batch / steps_per_epoch`.
        momentum_correction: scales what momentum has gathered along with the learning rate, which
            is part of it in Keras's SGD and RMSprop (Goyal et al. 2017, arXiv:1706.02677, 2.3).
        steps_per_epoch: batches of an epoch; needed if Keras does not know it.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ConfigError(f"{self._who} needs initial_lr, the learning rate to multiply.")
        self.initial_lr = initial_lr
        self.multiplier = multiplier
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._scale: Any = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Checks that the learning rate can be set, and when."""
        self._check_learning_rate()
        self._scale = None
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(
                    f"{self._who} sets the learning rate by the fraction of the epoch, and the "
                    "data set does not say how many batches an epoch has. Add steps_per_epoch=..."
                )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Sets the learning rate, if it is due."""
        over = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or over or (self.staircase and batch > 0):
            return
        fraction = 0.0 if self.staircase else batch / (self.steps_per_epoch or 1)
        self._set(self.initial_lr * self.factor(self._epoch + fraction))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the learning rate as `lr`."""
        if logs is not None:
            logs["lr"] = float(np.asarray(self.model.optimizer.learning_rate))

    def factor(self, epoch: float) -> float:
        """The factor of the learning rate.

        Args:
            epoch: the epoch, from 0, with the fraction of it that has passed.
        """
        return self.multiplier(epoch) if callable(self.multiplier) else self.multiplier

    def _check_learning_rate(self) -> None:
        optimizer = unwrapped(self.model.optimizer)
        learning_rate = getattr(optimizer, "_learning_rate", None)
        if not isinstance(learning_rate, keras.Variable):
            kind = getattr(learning_rate, "__name__", type(learning_rate).__name__)
            raise ConfigError(
                f"{self._who} sets the learning rate, and that of the optimizer {optimizer.name!r} "
                f"is computed by {kind}. Leave out the callback, or give the optimizer a number."
            )

    def _set(self, new: float) -> None:
        optimizer = unwrapped(self.model.optimizer)
        old = float(np.asarray(optimizer.learning_rate))
        optimizer.learning_rate = new
        gathered = _gathered_by_momentum(optimizer) if self.momentum_correction else []
        if gathered and old > 0 and new != old:
            if self._scale is None:
                self._scale = tf.function(_scale)
            self._scale([v.value for v in gathered], tf.constant(new / old, tf.float64))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr`, batch by batch.

    A large batch trains well at a learning rate that is scaled with it once the weights have left
    their initial values (Goyal et al. 2017, arXiv:1706.02677).

    Args:
        initial_lr: the learning rate after the warm-up, scaled by `hvd.size()`.
        warmup_epochs: how many epochs it takes.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: batches of an epoch; needed if Keras does not know it.
        verbose: 1 prints the learning rate that has been reached, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            1.0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def factor(self, epoch: float) -> float:
        """The factor of the learning rate; 1 in the last batch of the warm-up.

        Args:
            epoch: the epoch, from 0, with the fraction of it that has passed.
        """
        size = int(initialized(self._who).size())
        passed = epoch + 1 / (self.steps_per_epoch or 1)
        return (1 + passed * (size - 1) / self.warmup_epochs) / size

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the learning rate, and reports the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.warmup_epochs and initialized(self._who).rank() == 0:
            reached = float(np.asarray(self.model.optimizer.learning_rate))
            print(f"\nEpoch {epoch + 1}: the learning rate is warmed up, at {reached:g}.")


def _gathered_by_momentum(optimizer: Optimizer) -> list[Any]:
    """The variables of an optimizer that add up past updates, learning rate included."""
    if isinstance(optimizer, keras.optimizers.SGD):
        return [v for v in getattr(optimizer, "momentums", []) if v is not None]
    if isinstance(optimizer, keras.optimizers.RMSprop):
        return [v for v in getattr(optimizer, "_momentums", []) if v is not None]
    return []


def _scale(variables: list[Any], factor: Scalar) -> None:
    for variable in variables:
        variable.assign(variable * tf.cast(factor, variable.dtype))
