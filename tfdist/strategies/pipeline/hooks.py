"""The seams of Keras for models that are trained as pipelines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist import types
from tfdist._keras import CallbackList, TensorFlowTrainer, legacy_h5_format
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
    writers = [*saving.writers(), (legacy_h5_format, "save_model_to_hdf5")]
    return [
        *(Hook(owner, name, _complete_files(flush_all)) for owner, name in writers),
        Hook(TensorFlowTrainer, "make_train_function", _piped(make)),
        Hook(TensorFlowTrainer, "evaluate", _flushed),
        Hook(TensorFlowTrainer, "predict", _flushed),
        Hook(TensorFlowTrainer, "_get_metrics_result_or_logs", _complete),
        Hook(CallbackList, "on_epoch_end", _flushed_callbacks),
        Hook(CallbackList, "on_train_end", _reported(report)),
    ]


def flush(model: Model | None) -> None:
    """Ends all batches of a model that are under way."""
    function = vars(model).get(_FUNCTION) if model is not None else None
    if function is not None:
        function.flush()


def _piped(make: Callable[[Any], PipelineFunction]) -> Callable[[Any], Any]:
    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        """Keras runs a model in one piece; a pipeline runs its stages on devices."""

        @functools.wraps(original)
        def make_train_function(self: Model, force: bool = False) -> Callable[..., Any]:
            if self.train_function is not None and not force:
                return self.train_function
            before = vars(self).get(_FUNCTION)
            if before is not None:
                before.close()
            function = make(self)
            object.__setattr__(self, _FUNCTION, function)
            self.train_function = function
            return function

        return make_train_function

    return hook


def _flushed(original: Callable[..., Any]) -> Callable[..., Any]:
    """The weights of all batches that were begun are evaluated."""

    @functools.wraps(original)
    def look(self: Model, *args: object, **kwargs: object) -> object:
        flush(self)
        return original(self, *args, **kwargs)

    return look


def _complete_files(flush_all: Callable[[], None]) -> Callable[[Any], Any]:
    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        """A file holds the weights of all batches that were begun."""

        @functools.wraps(original)
        def write(*args: object, **kwargs: object) -> object:
            flush_all()
            return original(*args, **kwargs)

        return write

    return hook


def _reported(report: Callable[[PipelineFunction], None]) -> Callable[[Any], Any]:
    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        """The batches under way are ended, and their report is shown, before callbacks end."""

        @functools.wraps(original)
        def on_train_end(self: types.CallbackList, *args: object, **kwargs: object) -> object:
            model = getattr(self, "_model", None)
            flush(model)
            function = None if model is None else vars(model).get(_FUNCTION)
            if function is not None and function.engine is not None:
                report(function)
            return original(self, *args, **kwargs)

        return on_train_end

    return hook


def _complete(original: Callable[..., Any]) -> Callable[..., Any]:
    """The logs of an epoch, once all of its batches have ended."""

    @functools.wraps(original)
    def results(self: Model, logs: Logs | None) -> Logs:
        function = vars(self).get(_FUNCTION)
        if function is not None and function.is_under_way:
            function.flush()
            logs = self.get_metrics_result()
        return original(self, logs)

    return results


def _flushed_callbacks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Callbacks see the weights of all batches that were begun."""

    @functools.wraps(original)
    def callback(self: types.CallbackList, *args: object, **kwargs: object) -> object:
        flush(getattr(self, "_model", None))
        return original(self, *args, **kwargs)

    return callback
