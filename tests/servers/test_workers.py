"""Workers that are stopped, and steps that come again: each update is made once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.harness import Pool

CASES = "tests.cases.worker_cases"


@pytest.mark.parametrize(
    ("rule", "executions", "batch"),
    [
        ({"mode": "stale", "staleness": 4}, 1, 10),
        ({"mode": "sync"}, 1, 10),
        ({"mode": "async"}, 3, 0),
    ],
    ids=["stale", "sync", "async, between epochs"],
)
def test_a_stopped_worker_loses_its_step_to_another(
    cluster: Pool, rule: dict[str, Any], executions: int, batch: int
) -> None:
    [result] = cluster("parameter_server").call(
        f"{CASES}:stopped", rule=rule, executions=executions, batch=batch
    )
    assert 0 in result["silent"]
    for times, counts in zip((2, 2, 3), result["counts"], strict=True):
        np.testing.assert_array_equal(counts, times)


def test_a_step_of_a_training_that_has_failed_changes_nothing_later(cluster: Pool) -> None:
    [result] = cluster("parameter_server").call(f"{CASES}:abandoned")
    assert "of the program" in result["error"]
    assert result["silent"] == [0]
    np.testing.assert_array_equal(*result["counts"])


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_step_that_comes_again_is_not_made_twice(cluster: Pool, mode: str) -> None:
    [result] = cluster("parameter_server").call(f"{CASES}:replayed", mode=mode)
    step = result["counts"][0]
    assert step > 0
    assert result["counts"] == [step, step, 2 * step, 2 * step]
    assert "refuse an update that may have been applied already" in result["error"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_server_notes_its_changes_before_others_have_made_theirs(
    cluster: Pool, mode: str
) -> None:
    """A worker that dies while servers wait for each other leaves no change without its note."""
    [found] = cluster("parameter_server").call(f"{CASES}:notes", mode=mode)
    assert len({server for server, _ in found}) == 2
    waiting = [server for server, waits in found if set(waits) - {server}]
    assert len(waiting) == 2  # the number and the fate of the whole update, on the first server
    assert len(set(waiting)) == 1


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_no_step_holds_the_lock_while_its_worker_computes(cluster: Pool, mode: str) -> None:
    """A worker that is stopped there would stop all others."""
    [found] = cluster("parameter_server").call(f"{CASES}:under_the_lock", mode=mode)
    assert found == {"embedding": [], "position": []}
