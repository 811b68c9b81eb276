"""`model.stop_training` set within an epoch: all workers stop after the same step, or none does.

A worker that left the loop by itself would leave the others waiting in their next step. If a
callback of the program's own runs at batches, on any worker, each step is followed by an all-reduce
of one number: whether a worker stops. Elsewhere nobody asks. A flag that is set by other means, as
by a signal's handler, is then put off to the end of the epoch, where workers agree anyway.

Keras has such a flag for `evaluate` and for `predict`, too. These have no later place to stop at: a
flag that a callback's method for batches has not set is taken back, with a message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tfdist import types
from tfdist._keras import CallbackList
from tfdist._keras import keras_callbacks as callbacks
from tfdist.comm import host_collectives
from tfdist.keras.hooks import Hook, fitting, is_of_program
from tfdist.types import Callback, Logs, Strategy
from tfdist.utils.messages import logger

__all__ = ["ask_at_batches", "hooks", "may_stop", "method_of", "put_off"]

#: Attributes of a list of callbacks: whether its workers ask each other after each batch, and
#: whether a stop is put off. Of a model: that all workers set `stop_training` alike.
_ASKS, _PUT_OFF, _ALIKE = "_tfdist_asks", "_tfdist_put_off", "_tfdist_stops_alike"

#: The flag that ends a loop of Keras's, by the word for that loop in the callbacks' methods.
_FLAGS = {"test": "stop_evaluating", "predict": "stop_predicting"}

_AT_BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def hooks() -> list[Hook]:
    """The seams at which callbacks learn of a batch's end."""
    return [
        Hook(CallbackList, "on_train_batch_end", _stop_together),
        *(Hook(CallbackList, f"on_{name}_begin", partial(_to_be_asked, name)) for name in _FLAGS),
        *(Hook(CallbackList, f"on_{name}_batch_end", partial(_agreed, name)) for name in _FLAGS),
        Hook(callbacks.TerminateOnNaN, "on_batch_end", _note_stop),
    ]


def may_stop(listed: types.CallbackList) -> bool:
    """Whether a list has a callback of the program's own that runs at batches."""
    return _has_own(listed, _AT_BATCHES)


def _has_own(listed: types.CallbackList, methods: Sequence[str]) -> bool:
    return any(
        is_of_program(method_of(each, name)) for each in listed.callbacks for name in methods
    )


def ask_at_batches(listed: types.CallbackList, asks: bool) -> None:
    """Makes the workers ask each other after each batch; must be the same on all."""
    vars(listed)[_ASKS] = asks


def put_off(listed: types.CallbackList) -> bool:
    """Whether a stop has been put off to now."""
    return bool(vars(listed).pop(_PUT_OFF, False))


def method_of(callback: object, name: str) -> Callable[..., Any]:
    """A method as it was given, on the object itself or by its class."""
    own = getattr(callback, "__dict__", {})
    return own.get(name, getattr(type(callback), name))


def _stop_together(original: Callable[..., None]) -> Callable[..., None]:
    """A worker that stops by itself leaves the others in their next collective."""

    @functools.wraps(original)
    def on_train_batch_end(self: types.CallbackList, batch: int, logs: Logs | None = None) -> None:
        original(self, batch, logs)
        strategy = tf.distribute.get_strategy()
        if not fitting.is_up or host_collectives.worker_count(strategy) == 1:
            return
        model = self.model
        alike = vars(model).pop(_ALIKE, False)
        if vars(self).get(_ASKS):
            wanted = bool(model.stop_training)
            model.stop_training = host_collectives.any_worker(strategy, wanted)
        elif model.stop_training and not alike:
            model.stop_training, vars(self)[_PUT_OFF] = False, True
            logger.warning(
                f"worker {host_collectives.rank(strategy)}: stop_training was set within "
                "an epoch, but not by a callback's method for batches. All workers stop at the "
                "epoch's end."
            )

    return on_train_batch_end


def _to_be_asked(name: str, original: Callable[..., None]) -> Callable[..., None]:
    """Another loop may have callbacks of other kinds."""

    @functools.wraps(original)
    def begin(self: types.CallbackList, logs: Logs | None = None) -> None:
        original(self, logs)
        vars(self).pop(_ASKS + name, None)

    return begin


def _asks(name: str, listed: types.CallbackList, strategy: Strategy) -> bool:
    """Whether a callback of any worker runs at the batches of a loop; asked at the first one."""
    known = vars(listed).get(_ASKS + name)
    if known is None:
        own = _has_own(listed, (f"on_{name}_batch_begin", f"on_{name}_batch_end"))
        known = host_collectives.any_worker(strategy, own)
        vars(listed)[_ASKS + name] = known
    return bool(known)


def _agreed(name: str, original: Callable[..., None]) -> Callable[..., None]:
    """A worker that leaves `evaluate` or `predict` leaves the others in their next collective."""
    flag = _FLAGS[name]

    @functools.wraps(original)
    def batch_end(self: types.CallbackList, batch: int, logs: Logs | None = None) -> None:
        original(self, batch, logs)
        strategy, model = tf.distribute.get_strategy(), self.model
        # A batch of fewer rows than replicas is predicted by each worker alone.
        alone = name == "predict" and getattr(model.predict_function, "was_alone", False)
        if alone or host_collectives.worker_count(strategy) == 1:
            return
        stops = bool(getattr(model, flag, False))
        if _asks(name, self, strategy):
            setattr(model, flag, host_collectives.any_worker(strategy, stops))
        elif stops:
            setattr(model, flag, False)
            logger.warning(
                f"worker {host_collectives.rank(strategy)}: {flag} was not set by a callback's "
                f"method for batches (on_{name}_batch_end). It has no effect: the other workers "
                "do not know of it."
            )

    return batch_end


def _note_stop(original: Callable[..., None]) -> Callable[..., None]:
    """Notes that the loss, which is the same on all workers, ends the training."""

    @functools.wraps(original)
    def on_batch_end(self: Callback, batch: int, logs: Logs | None = None) -> None:
        original(self, batch, logs)
        if self.model.stop_training:
            vars(self.model)[_ALIKE] = True

    return on_batch_end
