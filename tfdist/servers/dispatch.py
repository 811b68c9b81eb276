"""Running jobs on workers: one thread for each worker takes the next job when it is free.

A job whose worker is lost goes back to the front and is taken by another. What is lost with a
worker, and how it comes back, is for TensorFlow's coordinator to say (its failure handler).
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdist._tensorflow import on_worker
from tfdist.errors import TfdistError
from tfdist.servers.gate import Gate

__all__ = ["Dispatcher", "Job"]

#: Jobs whose numbers lie within this may be under way at the same time.
SPAN = 192

#: After an error, seconds for the steps that run to end.
_DRAIN_SECONDS = 20.0


class Job:
    """Something to be run once, on any worker.

    Args:
        numbers: its own numbers, rising, which no other job has.
        run: runs it on a worker, and returns its result; may be called again on another worker.
        finish: is given the result, once.
        gated: updates for which the bound on staleness holds; 0 where it does not.
        prefers: the only worker that takes it while it is there; None for any.
    """

    def __init__(
        self,
        numbers: list[int],
        run: Callable[[int], Any],
        finish: Callable[[int, Any], None],
        gated: int = 0,
        prefers: int | None = None,
    ) -> None:
        self.prefers = prefers
        self.number, self.last = numbers[0], numbers[-1]
        self.run, self.finish, self.gated = run, finish, gated


class Dispatcher:
    """Hands jobs to workers.

    Args:
        coordinator: TensorFlow's `ClusterCoordinator` of the strategy.
        gate: says when a gated job may start.
        patience: seconds without any worker after which waiting ends with an error.

    Attributes:
        recoveries: for each worker how often it was lost and came back.
    """

    def __init__(self, coordinator: Any, gate: Gate, patience: float = 60.0) -> None:
        self._workers = coordinator._cluster.workers
        self.gate = gate
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: collections.deque[Job] = collections.deque()
        self._running: dict[int, Job] = {}
        self._lost: set[int] = set()
        self._error: BaseException | None = None
        self._number = 0
        self.recoveries = [0] * len(self._workers)
        for index in range(len(self._workers)):
            name = f"tfdist-worker-{index}"
            threading.Thread(target=self._serve, args=(index,), name=name, daemon=True).start()

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self._workers)

    def next_number(self) -> int:
        """A number for a new job."""
        self._number += 1
        return self._number

    def submit(self, job: Job) -> None:
        """Queues a job; waits while there is one in waiting for each worker.

        Raises:
            Exception: what an earlier job has raised.
        """

        def has_room() -> bool:
            oldest = min((j.number for j in self._under_way()), default=job.number)
            return len(self._waiting) < self.workers and job.last - oldest < SPAN

        self.wait_until(has_room)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()

    def join(self) -> None:
        """Waits until all jobs have been finished.

        Raises:
            Exception: what a job has raised.
        """
        self.wait_until(lambda: not self._waiting and not self._running)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until something holds that changes with the end of a job.

        Raises:
            TfdistError: if no worker has been there for the time of patience.
            Exception: what a job has raised.
        """
        with self._changed:
            without_worker: float | None = None
            while not condition():
                self._raise_error()
                if len(self._lost) < self.workers:
                    without_worker = None
                elif without_worker is None:
                    without_worker = time.monotonic()
                elif time.monotonic() - without_worker > self._patience:
                    raise TfdistError(
                        f"None of the {self.workers} workers has been there for "
                        f"{self._patience:g} s, so the training cannot go on. Their logs tell why "
                        "they ended. Start them again and resume from the last checkpoint."
                    )
                self._changed.wait(1.0)
            self._raise_error()

    def quiet(self) -> Any:
        """A context in which no job finishes."""
        return self._changed

    def drain(self) -> None:
        """Takes waiting jobs back, and waits a while for those that run, whatever they raise."""
        end = time.monotonic() + _DRAIN_SECONDS
        with self._changed:
            self._waiting.clear()
            while self._running and time.monotonic() < end:
                self._changed.wait(1.0)
                self._waiting.clear()  # those of lost workers come back
            self._error = None

    def cancel_waiting(self, which: Callable[[Job], bool]) -> int:
        """Takes jobs back that have not started; returns how many."""
        with self._changed:
            gone = [job for job in self._waiting if which(job)]
            for job in gone:
                self._waiting.remove(job)
            self._changed.notify_all()
            return len(gone)

    def _under_way(self) -> list[Job]:
        return [*self._waiting, *self._running.values()]

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            self._waiting.clear()
            raise error

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
                    self._changed.notify_all()
                    return job
                self._changed.wait()

    def _startable(self, index: int) -> Job | None:
        """The next job for a worker, unless it has to wait for others."""
        for job in self._waiting:
            if job.prefers in (None, index) or job.prefers in self._lost:
                again = job.gated and self.gate.has_started(job.number)
                admitted = not job.gated or again or self.gate.may_start(job.gated)
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
            if ended:
                self._end(index, job, result)
        except BaseException as error:
            self._fail(index, job, error)

    def _end(self, index: int, job: Job, result: Any) -> None:
        with self._changed:
            self._running.pop(index, None)
            self.gate.end(job.number)
            job.finish(index, result)
            self._changed.notify_all()

    def _put_back(self, index: int, job: Job) -> None:
        with self._changed:
            self._running.pop(index, None)
            self._waiting.appendleft(job)
            self._changed.notify_all()

    def _lose(self, index: int, job: Job) -> None:
        with self._changed:
            self._lost.add(index)
        self._put_back(index, job)

    def _recover(self, index: int) -> None:
        with self._changed:
            self._lost.discard(index)
            self.recoveries[index] += 1
            self._changed.notify_all()

    def _fail(self, index: int, job: Job, error: BaseException) -> None:
        with self._changed:
            self._running.pop(index, None)
            self.gate.end(job.number)
            if self._error is None:
                self._error = error
            self._changed.notify_all()
