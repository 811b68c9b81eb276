"""Jobs and workers without any server: who does which job when a worker is lost or silent."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tfdist.errors import TfdistError
from tfdist.strategies.parameter_server import scheduler
from tfdist.strategies.parameter_server.scheduler import Dispatcher, Gate, Job


class Lost(Exception):
    """A worker is gone."""


class Handler:
    """What TensorFlow's coordinator does about failures, for workers that stay away."""

    @contextlib.contextmanager
    def wait_on_failure(
        self, on_failure_fn: Any, worker_device_name: str, **others: Any
    ) -> Iterator[None]:
        """Tells of a loss, and waits for the worker, which never comes back."""
        try:
            yield
        except Lost as error:
            on_failure_fn(error)
            threading.Event().wait()


class Worker:
    """A worker of a coordinator."""

    failure_handler, device_name = Handler(), "worker"


class Coordinator:
    """A coordinator of some workers."""

    def __init__(self, workers: int) -> None:
        self._cluster = self
        self.workers = [Worker() for _ in range(workers)]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "on_worker", lambda worker: contextlib.nullcontext())


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """A gate that stays shut would keep a test waiting for ever."""

    def late(*_: object) -> None:
        raise TimeoutError("no worker has taken the step within 20 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def dispatcher(workers: int, step_timeout: float = 60.0, patience: float = 60.0) -> Dispatcher:
    return Dispatcher(Coordinator(workers), Gate(0), step_timeout, patience)


def lost(worker: int) -> None:
    raise Lost(f"worker {worker}")


def ignored(worker: int, result: Any) -> None:
    del worker, result


def until(event: threading.Event) -> None:
    assert event.wait(20)


def test_a_step_of_a_lost_worker_that_nobody_wants_any_more_keeps_nobody_waiting():
    jobs, started = dispatcher(2), threading.Event()

    def hold(worker: int) -> None:
        started.set()
        until(free)

    free = threading.Event()
    jobs.submit(Job([1], hold, ignored, prefers=1))
    until(started)
    jobs.submit(Job([2], lost, ignored, gated=1, prefers=0))
    jobs.wait_until(lambda: bool(jobs._lost))
    free.set()
    jobs.drain()
    ended: list[int] = []
    jobs.submit(Job([3], lambda worker: None, lambda worker, _: ended.append(worker), gated=1))
    jobs.join()
    assert ended == [1]


def test_a_step_that_has_started_and_is_cancelled_keeps_nobody_waiting():
    jobs = dispatcher(1)
    jobs.submit(Job([1], lost, ignored, gated=1))
    jobs.wait_until(lambda: bool(jobs._lost) and bool(jobs._waiting))
    assert jobs.cancel_waiting(lambda job: job.number == 1) == 1
    assert jobs.gate.may_start()


def test_an_error_discards_what_a_lost_worker_left():
    jobs = dispatcher(1)
    jobs.submit(Job([1], lost, ignored, gated=1))
    jobs.wait_until(lambda: bool(jobs._lost) and bool(jobs._waiting))
    jobs._error = ValueError("of another step")
    with pytest.raises(ValueError, match="of another step"):
        jobs.join()
    assert jobs.gate.may_start()


def test_another_worker_does_the_step_of_one_that_does_not_end_it(capfd):
    jobs, free, again = dispatcher(2, step_timeout=0.3), threading.Event(), threading.Event()
    ended: list[Any] = []

    def run(worker: int) -> int:
        if worker == 0:
            until(free)
            again.set()
        return worker

    jobs.submit(Job([1], run, lambda *given: ended.append(given), gated=1, prefers=0))
    jobs.join()
    assert ended == [(1, 1)]
    told = capfd.readouterr().err
    assert "worker 0 has not ended its step within step_timeout=0.3 s" in told
    free.set()
    until(again)
    jobs.wait_until(lambda: not jobs._silent)
    assert ended == [(1, 1)]
    jobs.submit(Job([2], lambda worker: 7, lambda *given: ended.append(given), prefers=0))
    jobs.join()
    assert ended[1:] == [(0, 7)]


def test_a_worker_whose_step_is_late_is_named_once_and_keeps_it(capfd, monkeypatch):
    monkeypatch.setattr(scheduler, "_LATE_SECONDS", 0.2)
    jobs, free, ended = dispatcher(2), threading.Event(), list[Any]()
    threading.Timer(2.5, free.set).start()
    jobs.submit(Job([1], lambda worker: until(free), lambda *given: ended.append(given), prefers=0))
    jobs.join()
    assert ended == [(0, None)]
    jobs.submit(Job([2], lambda worker: time.sleep(1.2), ignored, prefers=0))
    jobs.join()  # long, but not beside the step before
    lines = [line for line in capfd.readouterr().err.splitlines() if "has not ended" in line]
    assert len(lines) == 1
    assert "worker 0 has not ended its step for 0.2 s" in lines[0]
    assert "After step_timeout=60 s another worker does the step." in lines[0]


def test_no_worker_that_answers_ends_the_training_by_name():
    jobs, free = dispatcher(1, step_timeout=0.2, patience=0.2), threading.Event()
    jobs.submit(Job([1], lambda worker: until(free), ignored))
    with pytest.raises(TfdistError, match=r"worker 0 did not end .* step_timeout=0\.2 s"):
        jobs.join()
    free.set()


def test_a_step_that_does_not_end_does_not_end_the_next_training():
    """What is drained while it runs is for nobody, whatever becomes of it."""
    jobs, free, ended = dispatcher(1, step_timeout=0.2), threading.Event(), list[Any]()

    def fail(worker: int) -> None:
        until(free)
        raise ValueError("of a training that is over")

    jobs.submit(Job([1], fail, lambda *given: ended.append(given), gated=1))
    jobs.wait_until(lambda: bool(jobs._running))
    jobs.drain()
    free.set()
    jobs.submit(Job([2], lambda worker: None, lambda *given: ended.append(given), gated=1))
    jobs.join()
    assert ended == [(0, None)]


def test_an_error_of_who_takes_the_result_is_raised():
    jobs = dispatcher(1)

    def refuse(worker: int, result: Any) -> None:
        raise ValueError("this result")

    jobs.submit(Job([1], lambda worker: None, refuse))
    with pytest.raises(ValueError, match="this result"):
        jobs.join()
