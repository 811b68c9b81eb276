"""The state that the steps of all models of a strategy share: servers, workers, running jobs."""

from __future__ import annotations

import collections
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.config.server_options import ServerOptions
from tfdist.strategies.parameter_server import input_feed
from tfdist.strategies.parameter_server.apply_update import UPDATES_A_STEP
from tfdist.strategies.parameter_server.scheduler import Dispatcher, Job, gate_of
from tfdist.strategies.parameter_server.servers import CHIEF, Servers
from tfdist.strategies.parameter_server.tracing import TracedStep, trace
from tfdist.types import Array, Model, Structure, Tensor
from tfdist.utils.watchdog import outside_deadline

__all__ = ["PredictFunction", "Serving", "on_chief"]


class Serving:
    """The state that the training functions of all models of a strategy share.

    Args:
        servers: where the weights are.
        dispatcher: makes the dispatcher of jobs to workers, when it is first needed.

    Attributes:
        steps: for each worker how many training steps it has finished.
        cancelled: parts of global batches that were not needed before they had started.
        functions: the training and test functions of all models.
        epochs: the events of each epoch of the `fit` that runs, or ran last.
        verbose: whether tables are shown.
        tell_placement: shows the user which server holds which variable, if that is news.
    """

    def __init__(self, servers: Servers, dispatcher: Callable[[], Dispatcher]) -> None:
        self.servers = servers
        self.steps: collections.Counter[int] = collections.Counter()
        self.cancelled = 0
        self.functions: weakref.WeakSet[Any] = weakref.WeakSet()
        self.epochs: list[Any] = []
        self.verbose = True
        self.tell_placement: Callable[[], None] = lambda: None
        self._make_dispatcher = dispatcher
        self._dispatcher: Dispatcher | None = None
        self._said: set[str] = set()
        self._rounds: int | None = None

    @property
    def dispatcher(self) -> Dispatcher:
        """Runs jobs on workers."""
        if self._dispatcher is None:
            self._dispatcher = self._make_dispatcher()
        return self._dispatcher

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A block that traces graphs, which TensorFlow sends to all tasks and waits for them."""
        dispatcher = self.dispatcher
        dispatcher.wait_for_silent()
        message = (
            f"Tracing a step has taken longer than step_timeout={dispatcher.step_timeout:g} s. Its "
            f"graph goes to {dispatcher.workers} workers and {len(self.servers.devices)} ps, one "
            "of which is stopped or cut off. Look for the one whose log has ended, or give a "
            "larger step_timeout if tracing takes that long."
        )
        with outside_deadline(dispatcher.step_timeout, message):
            yield

    def join(self) -> None:
        """Waits for all steps under way."""
        for function in list(self.functions):
            function.submit_waiting()
        if self._dispatcher is not None:
            self._dispatcher.join()

    def settle(self) -> None:
        """Waits for all steps under way, and brings all metrics up to date."""
        for function in list(self.functions):
            function.finish()

    def abandon(self) -> None:
        """Leaves no step of a training that has ended with an error to those that follow."""
        for function in list(self.functions):
            function.forget_waiting()
        if self._dispatcher is not None:
            self._dispatcher.drain()
            self._refuse_what_is_left()

    def abandon_parts(self) -> None:
        """Forgets the parts of an update of which some may have been added up, and others not."""
        self.dispatcher.drain()
        self._refuse_what_is_left()
        with contextlib.suppress(tf.errors.OpError):  # a server may be what has failed
            self.servers.forget_parts()
        self._rounds = None

    def _refuse_what_is_left(self) -> None:
        """Refuses the updates of steps that still run: a worker may be stopped, and go on later."""
        with contextlib.suppress(tf.errors.OpError):
            self.servers.refuse_before(self.dispatcher.next_number() * UPDATES_A_STEP)

    def known_rounds(self) -> int:
        """The updates that the workers have made together; asked only if it is not known."""
        if self._rounds is None:
            self._rounds = int(self.servers.rounds[self.servers.devices[0]].numpy())
        return self._rounds

    def note_round(self, made: bool) -> None:
        """Keeps count of the updates that workers make together.

        Args:
            made: whether one was made; else the servers are asked when it matters.
        """
        self._rounds = self._rounds + 1 if made and self._rounds is not None else None

    def use(self, rule: ServerOptions) -> None:
        """Changes when a gradient becomes an update, for the trainings that follow.

        Args:
            rule: the rule; models that have been trained must be compiled anew.
        """
        self.join()
        self.servers.rule = rule
        self.dispatcher.gate = gate_of(rule)

    def say_once(self, text: str) -> None:
        """Shows the user something, the first time."""
        if text not in self._said:
            self._said.add(text)
            print(f"tfdist: {text}", file=sys.stderr, flush=True)


def on_chief(box: Array) -> Tensor:
    """A tensor on the chief: one made on a worker would keep Python waiting for the network."""
    with tf.device(CHIEF):
        return tf.constant(box)


# Predictions on the workers, in order.


class PredictFunction:
    """The function that Keras calls for each batch that is predicted: `model.predict_function`.

    Args:
        serving: runs the steps.
        model: the model.
    """

    def __init__(self, serving: Serving, model: Model) -> None:
        self._serving, self._model = serving, model
        self._traced: dict[Any, TracedStep] = {}

    def __call__(self, batches: list[Any]) -> Structure:
        """Predicts batches, each spread over the workers; the rows keep their order."""
        results: dict[int, Any] = {}
        loads = [
            load
            for batch in batches
            for load in input_feed.split(batch, self._serving.dispatcher.workers)
            if load.rows
        ]
        for index, load in enumerate(loads):
            self._serving.dispatcher.submit(self._job(load, index, results))
        self._serving.dispatcher.wait_until(lambda: len(results) == len(loads))
        ordered = [results[index] for index in range(len(loads))]
        return tf.nest.map_structure(lambda *rows: _concat(rows), *ordered)

    def _job(self, load: input_feed.Load, place: int, results: dict[int, Any]) -> Job:
        if load.key not in self._traced:
            servers = self._serving.servers
            with self._serving.tracing():
                self._traced[load.key] = trace(servers, self._model, "predict_step", load, 1)
        traced = self._traced[load.key]
        number = self._serving.dispatcher.next_number()

        def run(worker: int) -> Structure:
            box = on_chief(load.box(worker, [number, 0, 0]))
            outputs = traced.function(*load.given(worker), box)
            with tf.device(CHIEF):
                return tf.nest.map_structure(tf.identity, outputs, expand_composites=True)

        def finish(worker: int, outputs: Structure) -> None:
            results[place] = outputs

        return Job([number], run, finish)


def _concat(rows: tuple[Any, ...]) -> Tensor:
    if len(rows) == 1:
        return rows[0]
    if isinstance(rows[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(rows))
    return tf.concat(rows, 0) if rows[0].shape.rank else tf.stack(rows)
