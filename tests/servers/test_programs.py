"""Programs beyond Keras's own train_step, on parameter servers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.contract.conftest import assert_same
from tests.harness import Pool

CASES = "tests.cases.served_cases"
RULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"mode": "async"},
    "stale": {"mode": "stale", "staleness": 1},
}


@pytest.mark.parametrize("where", ["list", "dict"])
@pytest.mark.parametrize("mode", RULES)
def test_optimizers_in_a_list_or_a_dict(cluster: Pool, mode: str, where: str) -> None:
    expected = cluster.plain(f"{CASES}:own_optimizers", where=where)
    given = {"where": where, "rule": RULES[mode]}
    [result] = cluster("parameter_server").call(f"{CASES}:own_optimizers", **given)
    assert_same(expected, result, 1e-5, mode)


@pytest.mark.parametrize("mode", RULES)
def test_flags_that_a_layer_sets(cluster: Pool, mode: str) -> None:
    expected = cluster.plain(f"{CASES}:flags")
    [result] = cluster("parameter_server").call(f"{CASES}:flags", rule=RULES[mode])
    assert_same(expected, result, 0.0, mode)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_train_step_with_a_function_of_its_own(cluster: Pool, mode: str) -> None:
    expected = cluster.plain(f"{CASES}:inner_function")
    [result] = cluster("parameter_server").call(f"{CASES}:inner_function", rule=RULES[mode])
    assert result["iterations"] == expected["iterations"] == 8
    if mode == "sync":
        assert_same(expected, result, 1e-5, mode)
    assert np.isfinite(result["history"]).all()


@pytest.mark.parametrize("mode", ["sync", "stale"])
def test_history_has_one_number_for_an_epoch(cluster: Pool, mode: str) -> None:
    """Programs call `float` on each value."""
    rule = RULES[mode]
    [kinds] = cluster("parameter_server").call(f"{CASES}:kept_in_history", rule=rule)
    assert "loss" in kinds
    assert all(kept == ["float", "float"] for kept in kinds.values())


def test_servers_keep_nothing_of_a_model_that_is_gone(cluster: Pool) -> None:
    [result] = cluster("parameter_server").call(f"{CASES}:freed")
    assert not any(result["alive"])
    assert result["found"][0] == result["found"][1]
    assert not result["large"]


def test_a_step_with_compiled_metrics_is_computed_in_parts(cluster: Pool) -> None:
    [text] = cluster("parameter_server").call(f"{CASES}:reported")
    assert "runs on one worker" not in text
