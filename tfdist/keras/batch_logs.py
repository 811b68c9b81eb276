"""The logs of a training step, exchanged between the workers only if somebody reads them.

An exchange of a few numbers costs as much waiting as one of all gradients does. At the end of an
epoch Keras reads the metrics themselves, which are added up over the workers then. Within an epoch
the logs are read by callbacks for batches, such as the program's own. If there are none but those
that only show progress, each worker's logs are those of its own slices until the epoch's end.
`train_on_batch` and `test_on_batch` take their logs from the step: to read each metric once more is
an exchange for each of its variables.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import types
from tfdist._keras import TensorFlowTrainer
from tfdist._tf.distribute import local_results
from tfdist.comm import host_collectives
from tfdist.keras.hooks import Hook, fitting
from tfdist.keras.logs import NoticedResults, Results, sum_results, summed_metrics
from tfdist.keras.stopping import method_of
from tfdist.types import Logs, Model, Strategy

__all__ = ["are_read", "are_results", "exchange_in_step", "hooks", "note_readers"]

#: Attributes of a model: names of the steps whose logs are the results of its metrics, and that
#: callbacks read those of training.
_RESULTS, _READ = "_tfdist_steps_of_results", "_tfdist_logs_read"


def hooks() -> list[Hook]:
    """The seam at which Keras makes the function of an execution."""
    return [Hook(TensorFlowTrainer, "_make_function", _exchanged_if_read, priority=1)]


def are_read(listed: types.CallbackList) -> bool:
    """Whether a list has a callback that may read the logs of batches, going by its methods."""
    return any(_reads(callback) for callback in listed.callbacks)


def note_readers(model: Model, read: bool) -> None:
    """Notes whether callbacks read the logs of batches; must be the same on all workers."""
    vars(model)[_READ] = read


def _reads(callback: Any) -> bool:
    for name in ("on_batch_end", "on_train_batch_end"):
        if getattr(method_of(callback, name), "_is_default", False):
            continue
        own = name in vars(callback)
        owner = next((kind for kind in type(callback).__mro__ if name in vars(kind)), None)
        if own or owner not in _ONLY_AT_TIMES or _ONLY_AT_TIMES[owner](callback):
            return True
    return False


#: Keras's callbacks with a method for batches, and whether one of them reads its logs.
_ONLY_AT_TIMES: dict[Any, Callable[[Any], bool]] = {
    keras.callbacks.ProgbarLogger: lambda callback: False,
    keras.callbacks.BackupAndRestore: lambda callback: False,
    keras.callbacks.ModelCheckpoint: lambda callback: callback.save_freq != "epoch",
    keras.callbacks.TensorBoard: lambda callback: callback.update_freq != "epoch",
}


def exchange_in_step(
    strategy: Strategy, model: Model, name: str, logs: Logs | None, results: Results
) -> bool:
    """Whether a step that is being traced must exchange its logs.

    A training step need not if they are the results of the model's metrics, all of them: these can
    be read from the metrics at any time. Other logs, such as a loss that the program returns, are
    the step's.

    Args:
        strategy: the strategy.
        model: the model.
        name: the step's name, `train_step` or `test_step`.
        logs: the step's logs on this replica.
        results: the results that `NoticedResults` noted on this replica.
    """
    own = (
        isinstance(logs, dict)
        and all(id(value) in results for value in logs.values())
        and set(logs) == set(model.get_metrics_result())
    )
    steps = vars(model).setdefault(_RESULTS, {})
    steps[name] = own
    return not (own and name == "train_step" and host_collectives.worker_count(strategy) > 1)


def are_results(model: Model, name: str) -> bool:
    """Whether the logs of a model's `train_step` or `test_step` are its metrics' results.

    To be asked once the step is traced.
    """
    return bool(vars(model).get(_RESULTS, {}).get(name))


def _exchanged_if_read(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras's step returns logs that are the same on all workers only if these exchange them."""

    @functools.wraps(original)
    def make_function(self: Model, step_function: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, step_function)
        strategy = self.distribute_strategy
        if host_collectives.worker_count(strategy) == 1 or step_function.__name__ != "train_step":
            return function
        exchanged = _exchange_of(self)

        def execute(iterator: Iterator[Any]) -> Any:
            logs = function(iterator)
            if not are_results(self, "train_step"):
                return logs
            # A loop of the program's own that calls the function may read what it returns.
            return exchanged() if vars(self).get(_READ) or not fitting.is_up else logs

        return execute

    return make_function


def _exchange_of(model: Model) -> Callable[[], Logs]:
    """A function that adds up a model's metrics over all replicas and returns their results."""
    alive: Callable[[], Any] = weakref.ref(model)

    def exchange() -> Logs:
        model = alive()
        strategy, noticed = model.distribute_strategy, NoticedResults(summed_metrics(model))

        def on_replica() -> Logs:
            return sum_results(model.get_metrics_result(), noticed.on_this_replica())

        with noticed:
            logs: Logs = strategy.run(on_replica)
        return tf.nest.map_structure(lambda leaf: local_results(strategy, leaf)[0], logs)

    compiled: Callable[[], Logs] = tf.function(exchange, autograph=False)
    return compiled
