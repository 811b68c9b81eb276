"""Running a Keras model's steps on the workers: the functions that Keras's loops call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.strategies.parameter_server import input_feed
from tfdist.strategies.parameter_server.remote_step import NotSplittable
from tfdist.strategies.parameter_server.scheduler import Job
from tfdist.strategies.parameter_server.serialization import joined
from tfdist.strategies.parameter_server.step_function import Serving, on_chief
from tfdist.strategies.parameter_server.tracing import Numbers, TracedStep, trace
from tfdist.types import Array, Logs, Model

__all__ = ["StepFunction"]

#: Seconds between two looks at the metrics while steps run at the same time.
_LOGS_EVERY = 0.2

#: Most steps of a small model that one call to a worker runs, and the weights of such a model.
_STEPS_A_CALL, _MOST_STEPS_A_CALL, _SMALL = 8, 32, 1 << 20


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
        self._parts = serving.servers.parts if method == "train_step" else 1
        self._sync = method == "train_step" and serving.servers.rule.mode == "sync"
        self._numbers = Numbers()
        self._finished = 0
        self._batches: int | None = None
        self._waiting: list[input_feed.Load] = []
        self._waiting_for: TracedStep | None = None
        self._logs: Logs | None = None
        self._logged = 0.0

    def __call__(self, iterator: Iterator[Any]) -> Logs | None:
        """Runs the steps of an execution.

        Args:
            iterator: a `ServedIterator`, or an iterator over batches.

        Returns:
            The logs so far.

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

        Returns:
            The logs, or None before the first step.
        """
        self._serving.join()
        return self._read_logs(now=True) if self._finished else None

    def owns(self, logs: object) -> bool:
        """Whether these are the logs that this function returned last."""
        return logs is not None and logs is self._logs

    def _run(self, make_loads: Callable[[int], list[input_feed.Load]]) -> None:
        loads, traced = self._prepare(make_loads)
        if self._sync:
            _run_together(self._serving, traced, loads, self._finish)
            return
        if traced is not self._waiting_for:
            self.submit_waiting()
        self._waiting_for = traced
        self._waiting.append(loads[0])
        if len(self._waiting) >= self._steps_a_call(traced, loads[0]):
            self.submit_waiting()
            self._serving.dispatcher.wait_until(lambda: self._finished > 0)

    def _steps_a_call(self, traced: TracedStep, load: input_feed.Load) -> int:
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
            job = job_of(self._serving, traced, group, 0, 0, self._finish)
            job.gated = traced.updates  # a rule without a bound has a gate that admits all
            self._serving.dispatcher.submit(job)

    def _prepare(
        self, make_loads: Callable[[int], list[input_feed.Load]]
    ) -> tuple[list[input_feed.Load], TracedStep]:
        loads = make_loads(self._parts)
        try:
            return loads, self._trace(loads[0])
        except NotSplittable as reason:
            self._parts = 1
            self._serving.say_once(
                f"each step of {self._model.name!r} runs on one worker, since it {reason}: its "
                "parts on several workers would not add up to what one process computes."
            )
            return self._prepare(make_loads)

    def _trace(self, load: input_feed.Load) -> TracedStep:
        key = (self._parts, load.key)
        if key not in self._traced:
            servers = self._serving.servers
            with self._serving.tracing():
                traced = trace(servers, self._model, self._method, load, self._parts)
            weights = self._model.weights
            size = sum(w.shape.num_elements() * w.value.dtype.size for w in weights)
            traced.small = size <= _SMALL
            self._traced[key] = traced
            self._serving.tell_placement()
        return self._traced[key]

    def _finish(self, traced: TracedStep, job: JobInfo, numbers: list[Any]) -> None:
        """Takes a step's numbers; called once for each, under the dispatcher's lock."""
        self._finished += job.steps
        if self._method == "train_step":
            self._serving.steps[job.worker] += job.steps
        if traced.tally is None:
            self._numbers.add(traced, job.step, numbers)

    def _read_logs(self, now: bool = False) -> Logs | None:
        time_since = time.monotonic() - self._logged
        if self._logs is not None and not self._sync and not now and time_since < _LOGS_EVERY:
            return self._logs
        self._logged = time.monotonic()
        for traced in self._traced.values():
            if traced.tally is not None:
                self._numbers.take(traced, traced.tally.news())
        if self._logs is not None and not now and not self._numbers.pending:
            return self._logs  # no step has ended since: the metrics may have been reset
        with self._serving.dispatcher.quiet():
            scalars = self._numbers.flush()
        traced = self._numbers.latest
        self._logs = _named(traced.logs, scalars, self._model.get_metrics_result())
        return self._logs


def _next_loads(iterator: Iterator[Any]) -> Callable[[int], list[input_feed.Load]]:
    """Makes the loads of the next batch of Keras's loops, or of an iterator over batches."""
    if isinstance(iterator, input_feed.ServedIterator):
        return iterator.next_loads()
    batch = next(iterator)
    return lambda parts: input_feed.split(batch, parts)


def _named(logs: object, values: list[Any], results: dict[str, Any]) -> Any:
    """The logs of a step: metrics as they stand now, scalars as the step returned them."""

    def value(place: Any) -> object:
        if place is None:
            return None
        return float(values[place]) if isinstance(place, int) else place.result()

    if not isinstance(logs, dict):
        return tf.nest.map_structure(value, logs)
    return {
        name: results[name] if name in results else tf.nest.map_structure(value, place)
        for name, place in logs.items()
    }


class JobInfo(NamedTuple):
    """The steps that a result belongs to.

    Attributes:
        worker: number of the worker that ran them.
        step: number of the first.
        steps: how many they are.
    """

    worker: int
    step: int
    steps: int


def job_of(
    serving: Serving,
    traced: TracedStep,
    loads: list[input_feed.Load],
    update: int,
    part: int,
    finish: Callable[[TracedStep, JobInfo, list[Any]], None],
) -> Job:
    """The job of steps that one worker runs one after the other, or of a part of one step."""
    numbers = [serving.dispatcher.next_number() for _ in loads]
    with contextlib.nullcontext() if traced.has(len(loads)) else serving.tracing():
        function = traced.several(len(loads))

    def run(worker: int) -> Array | None:
        each = zip(numbers, loads, strict=True)
        boxes = [load.box(worker, [number, update, part]) for number, load in each]
        box = boxes[0] if len(boxes) == 1 else joined(boxes)
        try:
            result = function(*loads[0].given(worker), on_chief(box))
            return result.numpy() if traced.tally is None else None
        except BaseException:
            for load in loads:
                load.failed(worker)
            raise

    def finished(worker: int, box: Array | None) -> None:
        for load in loads:
            load.done()
        returned = traced.packed.unpack(box) if traced.tally is None else []
        finish(traced, JobInfo(worker, numbers[0], len(loads)), returned)

    return Job(numbers, run, finished, prefers=loads[0].prefers)


def _run_together(
    serving: Serving,
    traced: TracedStep,
    loads: list[input_feed.Load],
    finish: Callable[[TracedStep, JobInfo, list[Any]], None],
) -> None:
    """One step of `sync`: the parts of a global batch, until their update has been made."""
    dispatcher, parts = serving.dispatcher, len(loads)
    needed = serving.servers.needed if parts > 1 else 1
    update = serving.known_rounds() if parts > 1 else 0
    done: list[int] = []

    def finish_part(each: TracedStep, info: JobInfo, numbers: list[Any]) -> None:
        finish(each, info, numbers)
        done.append(info.step)

    jobs = [job_of(serving, traced, [load], update, i, finish_part) for i, load in enumerate(loads)]
    if needed < parts:
        for part, job in enumerate(jobs):  # a fast worker does not begin what is not needed
            job.prefers = part
    try:
        for job in jobs:
            dispatcher.submit(job)
        dispatcher.wait_until(lambda: len(done) >= needed)
    except BaseException:
        serving.abandon_parts()
        raise
    if needed < parts:
        numbers = {job.number for job in jobs}
        gone = dispatcher.cancel_waiting(lambda job: job.number in numbers)
        serving.cancelled += gone
    if parts > 1:
        serving.note_round(made=traced.tally is not None)
