"""The harness reports failures, ends what hangs, and goes on with the next test."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import pytest

from tests.harness import TARGETS, CallError, Pool
from tests.harness import pool as pool_module

CASES = "tests.cases.harness_cases"


@pytest.mark.parametrize("name", ["plain", "single", "mirrored", "multi_worker"])
def test_each_process_answers(cluster: Pool, name: str) -> None:
    results = cluster(name).call(f"{CASES}:describe")
    assert [r["rank"] for r in results] == list(range(TARGETS[name].processes))
    assert {r["replicas"] for r in results} == {TARGETS[name].replicas}
    assert len({r["random"] for r in results}) == 1


def test_processes_are_kept(cluster: Pool) -> None:
    first, second = (cluster("plain").call(f"{CASES}:describe") for _ in range(2))
    assert first == second


def test_a_failing_worker_ends_the_others(cluster: Pool) -> None:
    started = time.monotonic()
    with pytest.raises(CallError, match="the last worker fails") as raised:
        cluster("multi_worker").call(f"{CASES}:fail_on_last", workers=2)
    assert time.monotonic() - started < 90
    assert raised.value.errors[1] == "RuntimeError: the last worker fails"
    assert len(cluster("multi_worker").call(f"{CASES}:describe")) == 2


def test_a_dead_worker_is_named_with_its_last_lines(cluster: Pool) -> None:
    with pytest.raises(CallError, match=r"worker 0: The process ended\.") as raised:
        cluster("plain").call(f"{CASES}:exit_on_last", workers=1)
    assert "the last words" in str(raised.value)


def test_a_call_ends_at_its_deadline(cluster: Pool) -> None:
    before = cluster("plain").call(f"{CASES}:describe")[0]
    with pytest.raises(CallError, match=r"No answer within 0\.5 s"):
        cluster("plain").call(f"{CASES}:sleep", deadline=0.5, seconds=60)
    with pytest.raises(ProcessLookupError):
        os.kill(before["pid"], 0)
    assert cluster("plain").call(f"{CASES}:describe")[0]["pid"] != before["pid"]


def test_a_reference_is_computed_once(cluster: Pool) -> None:
    first: Any = cluster.plain(f"{CASES}:describe")
    cluster("plain").stop()
    assert cluster.plain(f"{CASES}:describe") == first


def test_a_pool_that_is_closed_ends_calls_that_are_under_way(tmp_path: pathlib.Path) -> None:
    pool = Pool(tmp_path)
    pool("plain").call(f"{CASES}:describe")
    calls = [pool("plain").submit(f"{CASES}:sleep", seconds=60, deadline=90) for _ in range(2)]
    time.sleep(1)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 30
    assert calls[1].cancelled()
    assert not pool("plain").process_ids()


def test_a_pool_stops_the_processes_that_were_used_longest_ago(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "KEPT", 2)
    pool = Pool(tmp_path)
    try:
        for name in ("plain", "devices", "single"):
            pool(name).call(f"{CASES}:describe")
        pool("devices").call(f"{CASES}:describe")
        running = {name: len(cluster.process_ids()) for name, cluster in pool._clusters.items()}
        assert running == {"plain": 0, "single": 1, "devices": 1}
        assert pool("plain").call(f"{CASES}:describe")
    finally:
        pool.close()
