"""The seams of Keras for models that are trained as pipelines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import types
from tfdist._keras import CallbackList, TensorFlowTrainer, legacy_h5_format
from tfdist._tf.distribute import complete_on
from tfdist._tf.variables import ASSIGNMENTS, ResourceVariable
from tfdist.keras import saving
from tfdist.keras.hooks import Hook
from tfdist.strategies.pipeline.train_function import PipelineFunction
from tfdist.types import Logs, Model

__all__ = ["flush", "hooks"]

_FUNCTION = "_tfdist_pipeline"


def hooks(
    make: Callable[[Any], PipelineFunction],
    report: Callable[[PipelineFunction], None],
    flush_all: Callable[[], None],
) -> list[Hook]:
    """The seams, for one strategy.

    Args:
        make: makes a model's training function.
        report: called at the end of `fit`.
        flush_all: ends the batches of all models that are under way, before a file is written:
            what is written may be a part of a model, or an archive that has one.
    """

    def before_files(*args: object) -> None:
        """A file holds the weights of all batches that were begun."""
        flush_all()

    def before_the_end(callbacks: types.CallbackList, *args: object) -> None:
        """The batches under way are ended, and their report is shown, before callbacks end."""
        _before_callbacks(callbacks)
        function = _function_of(getattr(callbacks, "_model", None))
        if function is not None and function.engine is not None:
            report(function)

    writers = [*saving.writers(), (legacy_h5_format, "save_model_to_hdf5")]
    return [
        *(Hook(owner, name, _first(before_files)) for owner, name in writers),
        *(Hook(ResourceVariable, name, _completed) for name in ASSIGNMENTS),
        Hook(TensorFlowTrainer, "make_train_function", _piped(make)),
        Hook(TensorFlowTrainer, "evaluate", _first(_before_evaluation)),
        Hook(TensorFlowTrainer, "predict", _first(_before_evaluation)),
        Hook(TensorFlowTrainer, "_get_metrics_result_or_logs", _complete),
        Hook(CallbackList, "on_epoch_end", _first(_before_callbacks)),
        Hook(CallbackList, "on_train_end", _first(before_the_end)),
    ]


def _function_of(model: Model | None) -> PipelineFunction | None:
    return None if model is None else vars(model).get(_FUNCTION)


def flush(model: Model | None) -> None:
    """Ends all batches of a model that are under way."""
    function = _function_of(model)
    if function is not None:
        function.flush()


def _before_evaluation(model: Model, *args: object) -> None:
    """The weights of all batches that were begun are evaluated."""
    flush(model)


def _before_callbacks(callbacks: types.CallbackList, *args: object) -> None:
    """Callbacks see the weights of all batches that were begun."""
    flush(getattr(callbacks, "_model", None))


def _first(act: Callable[..., None]) -> Callable[[Any], Any]:
    """A hook that does something, whose docstring is the reason, before what Keras does."""

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            act(*args)
            return original(*args, **kwargs)

        return call

    hook.__doc__ = act.__doc__
    return hook


def _completed(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function would read a weight of another task before that has got the new value."""

    @functools.wraps(original)
    def assign(self: types.Variable, *args: object, **kwargs: object) -> object:
        result = original(self, *args, **kwargs)
        if tf.executing_eagerly():
            complete_on(self.device)
        return result

    return assign


def _piped(make: Callable[[Any], PipelineFunction]) -> Callable[[Any], Any]:
    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        """Keras runs a model in one piece; a pipeline runs its stages on devices."""

        @functools.wraps(original)
        def make_train_function(self: Model, force: bool = False) -> Callable[..., Any]:
            if self.train_function is not None and not force:
                return self.train_function
            before = _function_of(self)
            if before is not None:
                before.close()
            function = make(self)
            object.__setattr__(self, _FUNCTION, function)
            self.train_function = function
            return function

        return make_train_function

    return hook


def _complete(original: Callable[..., Any]) -> Callable[..., Any]:
    """The logs of an epoch, once all of its batches have ended."""

    @functools.wraps(original)
    def results(self: Model, logs: Logs | None) -> Logs:
        function = _function_of(self)
        if function is not None and function.is_under_way:
            function.flush()
            logs = self.get_metrics_result()
        return original(self, logs)

    return results
