"""Running a Keras model's steps on the workers: the functions that Keras's loops call."""

from __future__ import annotations

import collections
import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.config.server_options import ServerOptions
from tfdist.strategies.parameter_server import feeding
from tfdist.strategies.parameter_server.apply_update import UPDATES_A_STEP
from tfdist.strategies.parameter_server.remote_step import NotSplittable
from tfdist.strategies.parameter_server.scheduler import Dispatcher, Job, gate_of
from tfdist.strategies.parameter_server.serialization import joined
from tfdist.strategies.parameter_server.servers import CHIEF, Servers
from tfdist.strategies.parameter_server.tracing import Numbers, TracedStep, trace
from tfdist.types import Array, Logs, Model, Structure, Tensor
from tfdist.utils.messages import logger
from tfdist.utils.watchdog import outside_deadline

__all__ = ["PredictFunction", "Serving", "StepFunction"]

#: Seconds between two looks at the metrics while steps run at the same time.
_LOGS_EVERY = 0.2

#: Steps of a small model that one call to a worker runs, and the most of any model.
_STEPS_A_CALL, _MOST_STEPS_A_CALL = 8, 32


class Serving:
    """The state that the training functions of all models of a strategy share.

    Args:
        servers: where the weights are.
        make_dispatcher: makes the dispatcher of jobs to workers, when it is first needed.

    Attributes:
        steps: for each worker how many training steps it has finished.
        cancelled: parts of global batches that were not needed before they had started.
        functions: the training and test functions of all models.
        epochs: the events of each epoch of the `fit` that runs, or ran last.
        verbose: whether tables are shown.
        report_placement: shows the user which server holds which variable, if that has changed.
    """

    def __init__(self, servers: Servers, make_dispatcher: Callable[[], Dispatcher]) -> None:
        self.servers = servers
        self.steps: collections.Counter[int] = collections.Counter()
        self.cancelled = 0
        self.functions: weakref.WeakSet[Any] = weakref.WeakSet()
        self.epochs: list[Any] = []
        self.verbose = True
        self.report_placement: Callable[[], None] = lambda: None
        self._make_dispatcher = make_dispatcher
        self._reported: set[str] = set()
        self._rounds: int | None = None

    @functools.cached_property
    def dispatcher(self) -> Dispatcher:
        """Runs jobs on workers."""
        return self._make_dispatcher()

    @property
    def _has_dispatcher(self) -> bool:
        return "dispatcher" in vars(self)

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

    def trace(self, model: Model, method: str, load: feeding.Load, parts: int = 1) -> TracedStep:
        """Traces a step; see `tracing.trace`."""
        with self.tracing():
            return trace(self.servers, model, method, load, parts)

    def join(self) -> None:
        """Waits for all steps under way."""
        for function in list(self.functions):
            function.submit_waiting()
        if self._has_dispatcher:
            self.dispatcher.join()

    def settle(self) -> None:
        """Waits for all steps under way, and brings all metrics up to date."""
        for function in list(self.functions):
            function.finish()

    def abandon(self) -> None:
        """Leaves no step of a training that has ended with an error to those that follow."""
        for function in list(self.functions):
            function.forget_waiting()
        if self._has_dispatcher:
            self._drain()

    def abandon_parts(self) -> None:
        """Forgets the parts of an update of which some may have been added up, and others not."""
        self._drain()
        with contextlib.suppress(tf.errors.OpError):  # a server may be what has failed
            self.servers.forget_parts()
        self._rounds = None

    def _drain(self) -> None:
        """Refuses updates of steps that do not end: a worker may be stopped, and go on later."""
        self.dispatcher.drain()
        with contextlib.suppress(tf.errors.OpError):
            self.servers.refuse_before(self.dispatcher.next_number() * UPDATES_A_STEP)

    def known_rounds(self) -> int:
        """The updates that the workers have made together; asked only if it is not known."""
        if self._rounds is None:
            self._rounds = int(self.servers.round.numpy())
        return self._rounds

    def note_round(self, made: bool) -> None:
        """Keeps count of the updates that workers make together.

        If none was made, the servers are asked when it matters.
        """
        self._rounds = self._rounds + 1 if made and self._rounds is not None else None

    def use(self, rule: ServerOptions) -> None:
        """Changes when a gradient becomes an update; models must be compiled anew after that."""
        self.join()
        self.servers.rule = rule
        self.dispatcher.gate = gate_of(rule)

    def report_once(self, text: str) -> None:
        """Shows the user something, the first time."""
        if text not in self._reported:
            self._reported.add(text)
            logger.info(text)


class StepFunction:
    """The function that Keras calls for each step: `model.train_function` or `model.test_function`.

    Args:
        serving: runs the steps.
        model: the model.
        method: `"train_step"` or `"test_step"`.
    """

    def __init__(self, serving: Serving, model: Model, method: str) -> None:
        self._serving, self._model, self._method = serving, model, method
        serving.functions.add(self)
        self._traced: dict[Any, TracedStep] = {}
        self._lengths = feeding.Lengths()
        self._parts = serving.servers.parts if method == "train_step" else 1
        self._sync = method == "train_step" and serving.servers.rule.mode == "sync"
        self._numbers = Numbers()
        self._finished = 0
        self._batches: int | None = None
        self._waiting: list[feeding.Load] = []
        self._waiting_for: TracedStep | None = None
        self._logs: Logs | None = None
        self._logged = 0.0

    def __call__(self, iterator: Iterator[Any]) -> Logs | None:
        """Runs the steps of an execution on the batches of an iterator; returns the logs so far.

        Raises:
            StopIteration: at the end of the data.
        """
        for number in range(self._model.steps_per_execution):
            try:
                make_loads = _next_loads(iterator)
                self._batches = getattr(iterator, "batches", None)
            except (StopIteration, tf.errors.OutOfRangeError):
                if number == 0:
                    self._serving.join()
                    raise
                break
            self._run(make_loads)
        return self._read_logs()

    def finish(self) -> Logs | None:
        """Waits for the steps under way and brings the metrics up to date.

        Returns the logs, or None before the first step.
        """
        self._serving.join()
        return self._read_logs(now=True) if self._finished else None

    def owns(self, logs: object) -> bool:
        """Whether these are the logs that this function returned last."""
        return logs is not None and logs is self._logs

    def _run(self, make_loads: Callable[[int], list[feeding.Load]]) -> None:
        loads, traced = self._prepare(make_loads)
        if self._is_in_order(traced):
            self._run_together(traced, loads)
            return
        if traced is not self._waiting_for:
            self.submit_waiting()
        self._waiting_for = traced
        self._waiting.append(loads[0])
        if len(self._waiting) >= self._steps_a_call(traced, loads[0]):
            self.submit_waiting()
            self._serving.dispatcher.wait_until(lambda: self._finished > 0)

    def _is_in_order(self, traced: TracedStep) -> bool:
        """Whether each step waits for the one before.

        Steps of an evaluation that assign variables do, in all modes, which are for updates.
        """
        return self._sync or (self._method == "test_step" and traced.assigns)

    def _steps_a_call(self, traced: TracedStep, load: feeding.Load) -> int:
        """The steps that a worker gets at once: several if the call costs more than a step."""
        rule = self._serving.servers.rule
        alone = traced.tally is None or rule.mode == "stale" or load.prefers is not None
        alone = alone or not load.lasting
        if alone or not self._finished:
            return 1
        if self._model.steps_per_execution > 1:
            return min(_MOST_STEPS_A_CALL, int(self._model.steps_per_execution))
        if not traced.small or self._batches is None:
            return 1
        fair = self._batches // (4 * self._serving.dispatcher.workers)
        return max(1, min(_STEPS_A_CALL, fair)) if self._batches >= 0 else _STEPS_A_CALL

    def forget_waiting(self) -> None:
        """Forgets steps that were not handed over yet."""
        self._waiting = []

    def submit_waiting(self) -> None:
        """Hands over steps that wait for others, to go to a worker with these."""
        loads, self._waiting, traced = self._waiting, [], self._waiting_for
        if not loads or traced is None:
            return
        full = len(loads) == self._steps_a_call(traced, loads[0])
        for group in [loads] if full else [[load] for load in loads]:
            self._serving.dispatcher.submit(self._job(traced, group, []))

    def _prepare(
        self, make_loads: Callable[[int], list[feeding.Load]]
    ) -> tuple[list[feeding.Load], TracedStep]:
        loads = make_loads(self._parts)
        for load in loads:
            load.widen(self._lengths)
        try:
            return loads, self._trace(loads[0])
        except NotSplittable as reason:
            self._parts = 1
            self._serving.report_once(
                f"each step of {self._model.name!r} runs on one worker, since it {reason}: its "
                "parts on several workers would not add up to what one process computes."
            )
            return self._prepare(make_loads)

    def _trace(self, load: feeding.Load) -> TracedStep:
        key = (self._parts, load.key)
        if key not in self._traced:
            self._traced[key] = self._serving.trace(self._model, self._method, load, self._parts)
            self._serving.report_placement()
        return self._traced[key]

    def _job(
        self,
        traced: TracedStep,
        loads: list[feeding.Load],
        done: list[int],
        update: int = 0,
        part: int = 0,
    ) -> Job:
        """The job of steps that one worker runs one after the other, or of a part of one step.

        Its number is added to `done` when it has ended.
        """
        numbers = [self._serving.dispatcher.next_number() for _ in loads]
        if len(loads) not in traced.functions:
            with self._serving.tracing():
                traced.trace_several(len(loads))
        function = traced.functions[len(loads)]

        def run(worker: int) -> Array | None:
            each = zip(numbers, loads, strict=True)
            boxes = [load.box(worker, [number, update, part]) for number, load in each]
            box = boxes[0] if len(boxes) == 1 else joined(boxes)
            try:
                result = function(*loads[0].resource_values(worker), _on_chief(box))
                return result.numpy() if traced.tally is None else None
            except BaseException:
                for load in loads:
                    load.failed(worker)
                raise

        def finish(worker: int, returned: Array | None) -> None:
            for load in loads:
                load.done()
            self._finished += len(loads)
            if self._method == "train_step":
                self._serving.steps[worker] += len(loads)
            if not self._is_in_order(traced):
                self._numbers.note_draws(traced, len(loads))
            if returned is not None:
                self._numbers.add(traced, traced.returned.unpack(returned), numbers[0])
            done.append(numbers[0])

        # A rule without a bound has a gate that admits all.
        return Job(numbers, run, finish, gated=traced.updates, prefers=loads[0].prefers)

    def _run_together(self, traced: TracedStep, loads: list[feeding.Load]) -> None:
        """One step: the parts of a global batch, until their update has been made."""
        serving, parts = self._serving, len(loads)
        needed = serving.servers.needed if parts > 1 else 1
        update = serving.known_rounds() if parts > 1 else 0
        done: list[int] = []
        jobs = [self._job(traced, [load], done, update, i) for i, load in enumerate(loads)]
        if needed < parts:
            for part, job in enumerate(jobs):  # a fast worker does not begin what is not needed
                job.prefers = part
        try:
            for job in jobs:
                serving.dispatcher.submit(job)
            serving.dispatcher.wait_until(lambda: len(done) >= needed)
        except BaseException:
            serving.abandon_parts()
            raise
        if needed < parts:
            numbers = {job.number for job in jobs}
            gone = serving.dispatcher.cancel_waiting(lambda job: job.number in numbers)
            serving.cancelled += gone
        self._numbers.note_draws(traced)
        if parts > 1:
            serving.note_round(made=traced.tally is not None)

    def _read_logs(self, now: bool = False) -> Logs | None:
        time_since = time.monotonic() - self._logged
        if self._logs is not None and not self._sync and not now and time_since < _LOGS_EVERY:
            return self._logs
        self._logged = time.monotonic()
        for traced in self._traced.values():
            if traced.tally is not None:
                self._numbers.add(traced, traced.tally.drain())
        if self._logs is not None and not now and not self._numbers.pending:
            return self._logs  # no step has ended since: the metrics may have been reset
        with self._serving.dispatcher.quiet():
            scalars = self._numbers.flush()
        traced = self._numbers.latest
        self._logs = _named(traced.logs, scalars, self._model.get_metrics_result())
        return self._logs


def _next_loads(iterator: Iterator[Any]) -> Callable[[int], list[feeding.Load]]:
    """Makes the loads of the next batch of Keras's loops, or of an iterator over batches."""
    if isinstance(iterator, feeding.Pass):
        return iterator.next_loads()
    batch = next(iterator)
    return lambda parts: feeding.split(batch, parts)


def _named(logs: object, values: list[Any], results: dict[str, Any]) -> Any:
    """The logs of a step: metrics as they stand now, scalars as the step returned them."""

    def value(source: Any) -> object:
        if source is None:
            return None
        return float(values[source]) if isinstance(source, int) else source.now()

    if not isinstance(logs, dict):
        return tf.nest.map_structure(value, logs)
    return {
        name: results[name]
        if source is None and name in results
        else tf.nest.map_structure(value, source)
        for name, source in logs.items()
    }


def _on_chief(box: Array) -> Tensor:
    """A tensor on the chief: one made on a worker would keep Python waiting for the network."""
    with tf.device(CHIEF):
        return tf.constant(box)


class PredictFunction:
    """The function that Keras calls for each batch that is predicted: `model.predict_function`."""

    def __init__(self, serving: Serving, model: Model) -> None:
        self._serving, self._model = serving, model
        self._is_whole = False
        self._traced: dict[Any, TracedStep] = {}
        self._lengths = feeding.Lengths()
        self._numbers = Numbers()

    def __call__(self, batches: list[Any]) -> Structure:
        """Predicts batches, each spread over the workers; the rows keep their order."""
        results: dict[int, Any] = {}
        loads: list[tuple[feeding.Load, TracedStep]] = []
        for batch in batches:
            parts = self._split(batch)
            loads += [(load, traced) for load, traced in parts if load.rows] or parts[:1]
            self._numbers.note_draws(parts[0][1])
        for index, (load, traced) in enumerate(loads):
            self._serving.dispatcher.submit(self._job(load, traced, index, results))
        self._serving.dispatcher.wait_until(lambda: len(results) == len(loads))
        self._numbers.flush()
        ordered = [results[index] for index in range(len(loads))]
        return tf.nest.map_structure(lambda *rows: _concat(rows), *ordered)

    def _split(self, batch: Structure) -> list[tuple[feeding.Load, TracedStep]]:
        """The loads of a batch: one for each worker, unless the model needs all of it."""
        count = 1 if self._is_whole else self._serving.dispatcher.workers
        try:
            return [(load, self._trace(load, count)) for load in feeding.split(batch, count)]
        except NotSplittable:
            self._is_whole = True
        return self._split(batch)

    def _trace(self, load: feeding.Load, count: int) -> TracedStep:
        load.widen(self._lengths)
        if load.key not in self._traced:
            traced = self._serving.trace(self._model, "predict_step", load, count)
            self._traced[load.key] = traced
        return self._traced[load.key]

    def _job(
        self, load: feeding.Load, traced: TracedStep, index: int, results: dict[int, Any]
    ) -> Job:
        number = self._serving.dispatcher.next_number()

        def run(worker: int) -> Structure:
            box = _on_chief(load.box(worker, [number, 0, 0]))
            outputs = traced.function(*load.resource_values(worker), box)
            with tf.device(CHIEF):
                return tf.nest.map_structure(tf.identity, outputs, expand_composites=True)

        def finish(worker: int, outputs: Structure) -> None:
            results[index] = outputs

        return Job([number], run, finish)


def _concat(rows: tuple[Any, ...]) -> Tensor:
    if len(rows) == 1:
        return rows[0]
    if isinstance(rows[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(rows))
    return tf.concat(rows, 0) if rows[0].shape.rank else tf.stack(rows)
