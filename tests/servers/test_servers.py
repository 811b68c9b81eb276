"""Update rules, lost workers and slow ones, on two workers and two servers.

The counting model adds, for each example, the same number to the example's own weight, whatever the
weights are. A batch that is lost or done twice stands out in its weights.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from tests.cases.server_cases import BATCH, EXAMPLES
from tests.contract.conftest import assert_same
from tests.harness import CallError, Pool

CASES = "tests.cases.server_cases"
STEPS = EXAMPLES // BATCH
ASYNC = {"mode": "async"}


@pytest.fixture
def counting(cluster: Pool) -> Any:
    def run(**kwargs: Any) -> dict[str, Any]:
        [result] = cluster("parameter_server").call(f"{CASES}:counting", **kwargs)
        return result  # type: ignore[no-any-return]

    return run


@pytest.mark.parametrize(
    "source", [pytest.param("arrays", marks=pytest.mark.core), "dataset", "generator", "function"]
)
def test_async_applies_every_step_once(counting: Any, source: str) -> None:
    result = counting(rule=ASYNC, source=source)
    assert result["iterations"] == 2 * STEPS
    np.testing.assert_array_equal(result["counts"], 2.0)
    history = result["history"]
    assert history["seen"] == [EXAMPLES, EXAMPLES]
    assert [sum(counts) for counts in result["staleness"]] == [STEPS, STEPS]
    assert [sum(counts) for counts in result["steps"]] == [STEPS, STEPS]


def test_in_sync_each_worker_reads_its_part(counting: Any) -> None:
    result = counting(rule={"mode": "sync"}, source="function")
    assert result["iterations"] == STEPS  # two data sets of half the length, two epochs
    np.testing.assert_array_equal(result["counts"], 2.0)


def test_another_reads_what_a_lost_worker_has_left(counting: Any) -> None:
    result = counting(rule=ASYNC, kill=[1], source="function", pause=0.05)
    assert result["killed"] == [1]
    assert result["iterations"] == 2 * STEPS
    np.testing.assert_array_equal(result["counts"], 2.0)


@pytest.mark.parametrize("rule", [ASYNC, {"mode": "sync"}], ids=["async", "sync"])
def test_lost_workers_lose_no_batch_and_repeat_none(counting: Any, rule: dict[str, Any]) -> None:
    result = counting(rule=rule, kill=[1, 0], source="dataset", pause=0.05)
    assert result["killed"] == [1, 0]
    assert result["iterations"] == 2 * STEPS
    np.testing.assert_array_equal(result["counts"], result["counts"][0])
    assert result["counts"][0] == 2.0
    assert result["history"]["seen"] == [EXAMPLES, EXAMPLES]


@pytest.mark.parametrize("bound", [0, 1])
def test_wait_keeps_the_bound_and_drops_nothing(counting: Any, bound: int) -> None:
    rule = {"mode": "stale", "staleness": bound}
    result = counting(rule=rule, slow=True, pause=0.01, epochs=1)
    assert max(result["history"]["staleness_max"]) <= bound
    assert result["history"]["gradients_dropped"] == [0]
    np.testing.assert_array_equal(result["counts"], 1.0)


def test_drop_keeps_the_bound_and_counts_what_it_drops(counting: Any) -> None:
    rule = {"mode": "stale", "staleness": 0, "on_stale": "drop"}
    # A worker that is stopped between reading and applying is stale, at some time.
    result = counting(rule=rule, slow=True, pause=0.01, epochs=500, until="gradients_dropped")
    history = result["history"]
    dropped, epochs = int(sum(history["gradients_dropped"])), len(history["gradients_dropped"])
    assert max(history["staleness_max"]) == 0
    assert dropped > 0
    assert result["iterations"] + dropped == epochs * (STEPS // 5)
    assert result["counts"].sum() == epochs * EXAMPLES - dropped * 5 * BATCH


def test_damp_divides_the_step_by_the_staleness(counting: Any) -> None:
    rule = {"mode": "stale", "on_stale": "damp"}
    result = counting(rule=rule, pause=0.01, epochs=2)
    histogram = result["staleness"]
    expected = sum(n * BATCH / max(tau, 1) for counts in histogram for tau, n in enumerate(counts))
    np.testing.assert_allclose(result["counts"].sum(), expected, rtol=1e-5)


def test_backup_workers_leave_the_late_out(counting: Any) -> None:
    rule = {"mode": "sync", "backup_workers": 1}
    result = counting(rule=rule, slow=True, pause=0.01, epochs=1)
    steps = STEPS // 5
    assert result["iterations"] == steps
    assert result["history"]["gradients_dropped"] == [steps]
    # The loss is a sum. One of two parts is applied, and stands for the whole batch.
    assert result["counts"].sum() == EXAMPLES


@pytest.mark.parametrize(
    "kind",
    [pytest.param("arrays", marks=pytest.mark.core), "generator", "lengths", "weighted"],
)
def test_all_workers_take_part_in_ordinary_steps(cluster: Pool, kind: str) -> None:
    [said] = cluster("parameter_server").call(f"{CASES}:shared_out", kind=kind)
    assert said == []


def test_a_table_in_parts_is_looked_up_on_its_servers(cluster: Pool) -> None:
    expected = cluster.plain(f"{CASES}:table")
    [result] = cluster("parameter_server").call(f"{CASES}:table")
    assert result["parts"] == 2
    assert_same(expected["result"], result["result"], 1e-5, "the table in parts")


def test_a_loop_for_the_coordinator_loses_no_update(cluster: Pool) -> None:
    [result] = cluster("parameter_server").call(f"{CASES}:coordinated")
    assert result["iterations"] == 60
    assert result["counted"] == 60 * 8
    assert np.mean(result["losses"][-20:]) < np.mean(result["losses"][:20])


def test_optimizer_state_is_beside_its_variable(cluster: Pool) -> None:
    [pairs] = cluster("parameter_server").call(f"{CASES}:beside")
    assert len(pairs) == 8
    for weight, state in pairs:
        assert state == weight


def test_half_the_bytes_cross_the_network_in_bfloat16(cluster: Pool) -> None:
    [result] = cluster("parameter_server").call(f"{CASES}:wired")
    assert 0 < np.abs(result["wide"] - result["narrow"]).max() < 0.05
    assert result["dtypes"] == ["float32"]
    assert result["wire_types"] == ["bfloat16"]


def test_tensorboard_and_a_checkpoint_in_mid_epoch(cluster: Pool, tmp_path: pathlib.Path) -> None:
    [result] = cluster("parameter_server").call(f"{CASES}:reported", path=str(tmp_path))
    assert {"staleness", "epoch_staleness_mean", "epoch_updates_per_second"} <= set(result["tags"])
    assert result["iterations"] == 10


def test_a_loss_that_is_not_a_number_ends_the_training(cluster: Pool) -> None:
    [error] = cluster("parameter_server").call(f"{CASES}:not_a_number", of="loss")
    assert error.startswith("TfdistError: loss became NaN in epoch 1")
    assert "learning rate" in error
    assert cluster("parameter_server").call(f"{CASES}:not_a_number", of="metric") == [""]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_that_fails_leaves_nothing_behind(cluster: Pool, mode: str) -> None:
    [result] = cluster("parameter_server").call(f"{CASES}:after_an_error", mode=mode)
    assert "an example is broken" in result["error"]
    np.testing.assert_array_equal(result["counts"], 1.0)


def test_a_loop_without_a_coordinator_is_told_to_use_one(cluster: Pool) -> None:
    with pytest.raises(CallError, match=r"ClusterCoordinator\.create_per_worker_dataset"):
        cluster("parameter_server").call("tests.cases.step_cases:distribute_loop")


def test_no_step_is_lost_after_a_loop_by_hand(cluster: Pool) -> None:
    """The loop makes updates of which the chief does not hear."""
    [found] = cluster("parameter_server").call(f"{CASES}:loop_between")
    assert_same(cluster.plain(f"{CASES}:loop_between"), found, 1e-6, "parameter_server")
