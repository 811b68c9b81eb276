"""The iterators of past epochs, and those that are read on from epoch to epoch."""

from __future__ import annotations

import logging
import queue
import threading
import types
from typing import Any

import pytest

from tests.harness import Pool
from tfdist.keras import iterators

CASES = "tests.cases.data_cases"


@pytest.mark.parametrize(
    ("target", "resources"), [("single", 1), ("mirrored", 3), ("multi_worker", 1)]
)
def test_a_thread_frees_the_iterators_of_past_epochs(
    cluster: Pool, target: str, resources: int
) -> None:
    epochs = 3
    for result in cluster(target).call(f"{CASES}:freed_by_thread", epochs=epochs):
        assert result == {"taken": epochs * resources, "held": 0}


@pytest.mark.parametrize(("shuffled", "made"), [(False, 3), (True, 6)])
def test_iterators_that_keras_does_not_read_are_not_made(
    cluster: Pool, shuffled: bool, made: int
) -> None:
    case = f"{CASES}:iterators_made"
    for result in cluster("multi_worker").call(case, epochs=3, shuffled=shuffled):
        assert result == made


def test_references_that_come_together_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = types.SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(iterators, "time", clock)
    references: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for number in range(200):
        iterators._leave(references, number)
    references.put(None)
    iterators._drop(references)
    assert sum(slept) == pytest.approx(iterators._PAUSE)


def test_workers_of_servers_read_on_from_epoch_to_epoch(cluster: Pool) -> None:
    for result in cluster("parameter_server").call(f"{CASES}:coverage", kind="dataset_repeated"):
        assert result["iterations"] == 2 * 6


def test_the_end_of_a_process_tells_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(iterators, "_SAY_AFTER", 0.01)
    monkeypatch.setattr(iterators, "_LONGEST", 0.02)
    references: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stuck = threading.Event()
    thread = threading.Thread(target=stuck.wait, daemon=True)
    thread.start()
    try:
        with caplog.at_level(logging.INFO, "tfdist"):
            iterators._finish(references, thread)
    finally:
        stuck.set()
        thread.join()
    assert "autotuning of the input" in caplog.text
    assert references.get() is None
