"""Running jobs on workers: one thread for each worker takes the next job when it is free.

A job whose worker is lost goes back to the front and is taken by another. The state that is lost
with a worker, and its return, are left to TensorFlow's coordinator (its failure handler). A
worker that does not end its job in time counts as lost until it does. Only the worker that has a
job in `_running` ends it: what comes of a job that was taken from its worker is for nobody.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdist._tf.distribute import on_worker
from tfdist.config.server_options import ServerOptions
from tfdist.errors import TfdistError
from tfdist.utils.messages import logger
from tfdist.utils.watchdog import end_if_stuck

__all__ = ["Dispatcher", "Gate", "Job", "gate_of"]


# When a step may start, so that no gradient becomes staler than a bound. Pure.
#
# The updates that may come between a step's read and its own update are those of the steps that
# were under way when it started, and of those that start before it ends. A step starts only if
# that number stays within the bound for it and for every step that is under way. Fast workers
# wait for slow ones just as long as this takes, and no work is thrown away (stale synchronous
# parallel, Ho et al. 2013, with the bound counted in updates).


class Gate:
    """Admits steps.

    At most `bound` updates come between a step's read and its update; None admits every step.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._overlapping: dict[int, int] = {}
        self._updates: dict[int, int] = {}

    def may_start(self, updates: int = 1) -> bool:
        """Whether a step that makes that many updates may start now."""
        if self._bound is None or not self._overlapping:
            return True
        # Its updates may come before those of each step under way, and theirs before its own.
        most = max(self._overlapping.values()) + updates
        return max(most, sum(self._updates.values())) <= self._bound

    def start(self, step: int, updates: int = 1) -> None:
        """Notes the start of a step. One that starts again, on another worker, counts once."""
        if step in self._overlapping:
            return
        for other in self._overlapping:
            self._overlapping[other] += updates
        self._overlapping[step] = sum(self._updates.values())
        self._updates[step] = updates

    def has_started(self, step: int) -> bool:
        """Whether a step has started and not ended."""
        return step in self._overlapping

    def end(self, step: int) -> None:
        """Notes the end of a step."""
        # Steps under way keep their counts: the updates of this one came after their reads.
        self._overlapping.pop(step, None)
        self._updates.pop(step, None)


def gate_of(rule: ServerOptions) -> Gate:
    """The gate that keeps an update rule's bound."""
    waits = rule.mode == "stale" and rule.on_stale == "wait"
    return Gate(rule.staleness if waits else None)


#: Jobs whose numbers lie within this may be under way at the same time. With `UPDATES_A_STEP` (16)
#: updates each, their updates fit in the `WINDOW` (4096) that the servers remember.
SPAN = 192

#: After an error, seconds for the steps that run to end.
_DRAIN_SECONDS = 20.0

#: A step is named as late after so many seconds, or times the longest step before it.
_LATE_SECONDS, _LATE_TIMES = 30.0, 3.0


@dataclasses.dataclass(eq=False)
class Job:
    """Something to be run once, on any worker.

    Attributes:
        numbers: its own numbers, rising, which no other job has.
        run: runs it on a worker, and returns its result; may be called again on another worker.
        finish: is given the result, once.
        gated: updates for which the bound on staleness holds; 0 if it does not.
        prefers: the only worker that takes it while it is there; None for any.
    """

    numbers: list[int]
    run: Callable[[int], Any]
    finish: Callable[[int, Any], None]
    gated: int = 0
    prefers: int | None = None

    @property
    def number(self) -> int:
        """The first of its numbers."""
        return self.numbers[0]


class Dispatcher:
    """Hands jobs to workers.

    Args:
        coordinator: TensorFlow's `ClusterCoordinator` of the strategy.
        gate: decides when a gated job may start.
        step_timeout: seconds after which a job is taken from a worker that has not ended it.
        patience: seconds without any worker after which waiting ends with an error.

    Attributes:
        step_timeout: as above, for the jobs that run and those that follow.
        recoveries: for each worker how often it was lost and came back.
    """

    def __init__(
        self, coordinator: Any, gate: Gate, step_timeout: float, patience: float = 60.0
    ) -> None:
        self._workers = coordinator._cluster.workers
        self.gate = gate
        self.step_timeout = step_timeout
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: collections.deque[Job] = collections.deque()
        self._running: dict[int, Job] = {}
        self._started: dict[int, float] = {}
        self._late: set[int] = set()
        self._longest = 0.0
        self._lost: set[int] = set()
        self._silent: set[int] = set()
        self._error: BaseException | None = None
        self._number = 0
        self.recoveries = [0] * len(self._workers)
        for index in range(len(self._workers)):
            name = f"tfdist-worker-{index}"
            threading.Thread(target=self._serve, args=(index,), name=name, daemon=True).start()

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self._workers)

    def next_number(self) -> int:
        """A number for a new job."""
        self._number += 1
        return self._number

    def submit(self, job: Job) -> None:
        """Queues a job; waits while there is one in waiting for each worker.

        Raises:
            Exception: the error of an earlier job.
        """

        def has_room() -> bool:
            under_way = [*self._waiting, *self._running.values()]
            oldest = min((each.number for each in under_way), default=job.number)
            return len(self._waiting) < self.workers and job.numbers[-1] - oldest < SPAN

        self.wait_until(has_room)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()

    def join(self) -> None:
        """Waits until all jobs have been finished.

        Raises:
            Exception: the error of a job.
        """
        self.wait_until(lambda: not self._waiting and not self._running)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until something holds that changes with the end of a job.

        Raises:
            TfdistError: if no worker has been there for the time of patience.
            Exception: the error of a job.
        """
        with self._changed:
            without_worker: float | None = None
            while not condition():
                self._raise_error()
                self._take_from_silent()
                self._name_late()
                if len(self._lost | self._silent) < self.workers:
                    without_worker = None
                elif without_worker is None:
                    without_worker = time.monotonic()
                elif time.monotonic() - without_worker > self._patience:
                    raise TfdistError(self._without_workers())
                self._changed.wait(1.0)
            self._raise_error()

    def wait_for_silent(self) -> None:
        """Waits until each worker answers that has left a step undone.

        Raises:
            TfdistError: if one does not in the time of patience.
        """
        end = time.monotonic() + self._patience
        with self._changed:
            while self._silent and time.monotonic() < end:
                self._changed.wait(1.0)
            if self._silent:
                raise TfdistError(
                    f"A new graph goes to all workers, and {self._silent_ones()} for "
                    f"{self._patience:g} s. Start it again and resume from the last checkpoint."
                )

    def quiet(self) -> threading.Condition:
        """A context in which no job finishes."""
        return self._changed

    def drain(self) -> None:
        """Takes waiting jobs back, and waits a while for those that run, whatever they raise.

        Jobs that still run then have no receiver; their updates are to be refused
        (`Servers.refuse_before`).
        """
        end = time.monotonic() + min(_DRAIN_SECONDS, self.step_timeout)
        with self._changed:
            self._discard_waiting()
            while self._running and time.monotonic() < end:
                self._changed.wait(1.0)
                self._discard_waiting()  # those of lost workers come back
            for index in list(self._running):
                self._note_silent(index)
                self.gate.end(self._running.pop(index).number)
            self._error = None

    def cancel_waiting(self, which: Callable[[Job], bool]) -> int:
        """Takes jobs back that have not started; returns how many."""
        with self._changed:
            gone = [job for job in self._waiting if which(job)]
            for job in gone:
                self._waiting.remove(job)
                self.gate.end(job.number)
            self._changed.notify_all()
            return len(gone)

    def _discard_waiting(self) -> None:
        """Takes all waiting jobs back, of which those that a worker lost have passed the gate."""
        while self._waiting:
            self.gate.end(self._waiting.popleft().number)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            self._discard_waiting()
            raise error

    def _take_from_silent(self) -> None:
        """Hands jobs to others that their workers have not ended in time."""
        now = time.monotonic()
        for index, job in list(self._running.items()):
            if now - self._started[index] > self.step_timeout:
                del self._running[index]
                self._note_silent(index)
                self._waiting.appendleft(job)
                logger.warning(
                    f"worker {index} has not ended its step within step_timeout="
                    f"{self.step_timeout:g} s. Another worker does the step; worker {index} gets "
                    "no other until it answers."
                )
        self._changed.notify_all()

    def _note_silent(self, index: int) -> None:
        """Leaves a worker without jobs until it answers, for which TensorFlow may wait meanwhile.

        It sends each new function and some operations to all workers, and has no deadline for that.
        """
        self._silent.add(index)
        arguments = (self.step_timeout, self._stuck, lambda: index in self._silent)
        name = f"tfdist-guard-{index}"
        threading.Thread(target=end_if_stuck, args=arguments, name=name, daemon=True).start()

    def _stuck(self) -> str:
        return (
            f"{self._silent_ones()}. TensorFlow has waited for it for another "
            f"{self.step_timeout:g} s, with a function or an operation that goes to all workers. "
            "The worker is stopped or cut off. Start it again and resume from the last checkpoint."
        )

    def _name_late(self) -> None:
        """Names workers whose steps take far longer than any before, long before they are lost."""
        now, limit = time.monotonic(), max(_LATE_SECONDS, _LATE_TIMES * self._longest)
        for index in set(self._running) - self._late:
            if now - self._started[index] > limit:
                self._late.add(index)
                logger.warning(
                    f"worker {index} has not ended its step for {limit:.3g} s. It is slow, stopped "
                    f"or cut off, or a ps that it waits for is. After "
                    f"step_timeout={self.step_timeout:g} s another worker does the step."
                )

    def _without_workers(self) -> str:
        if not self._silent:
            return (
                f"None of the {self.workers} workers has been there for {self._patience:g} s, so "
                "the training cannot go on. Their logs tell why they ended. Start them again and "
                "resume from the last checkpoint."
            )
        return (
            f"None of the {self.workers} workers is left: {self._silent_ones()} since. A worker is "
            "stopped or cut off, or a ps that it waits for is. Start them again and resume from "
            "the last checkpoint, or give a larger step_timeout if a step takes that long."
        )

    def _silent_ones(self) -> str:
        names = ", ".join(f"worker {index}" for index in sorted(self._silent))
        within = f"step_timeout={self.step_timeout:g} s"
        return f"{names} did not end a step within {within} and has not answered"

    def _serve(self, index: int) -> None:
        while True:
            self._one(index, self._take(index))

    def _take(self, index: int) -> Job:
        with self._changed:
            while True:
                job = self._startable(index)
                if job is not None:
                    self._waiting.remove(job)
                    if job.gated:
                        self.gate.start(job.number, job.gated)
                    self._running[index] = job
                    self._started[index] = time.monotonic()
                    self._changed.notify_all()
                    return job
                self._changed.wait()

    def _startable(self, index: int) -> Job | None:
        """The next job for a worker, unless it has to wait for others."""
        for job in self._waiting:
            if job.prefers in (None, index) or job.prefers in self._lost | self._silent:
                again = job.gated and self.gate.has_started(job.number)
                admitted = not job.gated or again or self.gate.may_start(job.gated)
                # A job that waits at the gate is not overtaken by those behind it.
                return job if admitted else None
        return None

    def _one(self, index: int, job: Job) -> None:
        worker = self._workers[index]
        ended = False
        try:
            with worker.failure_handler.wait_on_failure(
                on_failure_fn=lambda error: self._lose(index, job),
                on_transient_failure_fn=lambda: self._put_back(index, job),
                on_recovery_fn=lambda: self._recover(index),
                worker_device_name=worker.device_name,
            ):
                with on_worker(worker):
                    result = job.run(index)
                ended = True
            # The failure handler does not raise a lost worker's error; there is no result then.
            if ended:
                self._end(index, job, result)
        except BaseException as error:
            self._end(index, job, error=error)

    def _gives_up(self, index: int, job: Job) -> bool:
        """Takes a job off its worker; False if it was taken before. The worker has answered."""
        self._silent.discard(index)
        self._late.discard(index)
        self._longest = max(self._longest, time.monotonic() - self._started[index])
        self._changed.notify_all()
        # A job that was taken from this worker is ended by another; this result does not count.
        if self._running.get(index) is not job:
            return False
        del self._running[index]
        return True

    def _end(
        self, index: int, job: Job, result: object = None, error: BaseException | None = None
    ) -> None:
        with self._changed:
            if self._gives_up(index, job):
                self.gate.end(job.number)
                try:
                    if error is not None:
                        raise error
                    job.finish(index, result)
                except BaseException as raised:
                    self._error = self._error or raised

    def _put_back(self, index: int, job: Job) -> None:
        with self._changed:
            if self._gives_up(index, job):
                self._waiting.appendleft(job)

    def _lose(self, index: int, job: Job) -> None:
        with self._changed:
            self._lost.add(index)
        self._put_back(index, job)

    def _recover(self, index: int) -> None:
        with self._changed:
            self._lost.discard(index)
            self.recoveries[index] += 1
            self._changed.notify_all()
