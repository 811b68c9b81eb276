"""Gradients are unscaled by the scale of their own loss, in every mode."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.conftest import assert_same
from tests.harness import Pool
from tests.harness.tiers import seldom

CASES = "tests.cases.scaling_cases"
RULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"mode": "async"},
    "stale": {"mode": "stale", "staleness": 1},
}


@pytest.mark.parametrize("lazy", [False, True], ids=["built", "lazy"])
@pytest.mark.parametrize("mode", RULES)
def test_a_scale_that_grows_changes_no_update(cluster: Pool, mode: str, lazy: bool) -> None:
    expected = cluster.plain(f"{CASES}:slope", lazy=lazy)
    assert expected == {"weight": -60.0, "iterations": 60, "scale": 27.0}
    [result] = cluster("parameter_server").call(f"{CASES}:slope", rule=RULES[mode], lazy=lazy)
    assert result == expected


def test_a_scale_that_grows_after_a_loss_does_not_shrink_its_update(cluster: Pool) -> None:
    [result] = cluster("parameter_server").call(f"{CASES}:overtaken")
    assert result == {"weight": -10.0, "scale": 4096.0}


@pytest.mark.parametrize("mode", RULES)
def test_a_gradient_that_overflows_halves_its_scale_once(cluster: Pool, mode: str) -> None:
    given = {"scale": 2.0**127, "growth": 1000}
    expected = cluster.plain(f"{CASES}:slope", **given)
    assert expected == {"weight": -58.0, "iterations": 58, "scale": 125.0}
    [result] = cluster("parameter_server").call(f"{CASES}:slope", rule=RULES[mode], **given)
    assert result["scale"] == expected["scale"]
    assert result["weight"] == -result["iterations"]
    assert 52 <= result["iterations"] <= 58  # a step that overlaps with another overflows too
    if mode == "sync":
        assert result == expected


@pytest.mark.parametrize(
    "target", ["parameter_server", "multi_worker", "pipeline", "zero", "zero3"]
)
@pytest.mark.parametrize(("large", "alike"), [(1.0, True), (300.0, False), *seldom((3e3, True))])
def test_mixed_float16_in_sync_is_one_process(
    cluster: Pool, target: str, large: float, alike: bool
) -> None:
    expected = cluster.plain(f"{CASES}:half", large=large, alike=alike)
    assert (expected["scale"] < 2.0**15) == (large > 1)
    for result in cluster(target).call(f"{CASES}:half", large=large, alike=alike):
        assert_same(expected, result, 1e-3, target)


def test_mixed_float16_trains_in_async(cluster: Pool) -> None:
    [result] = cluster("parameter_server").call(f"{CASES}:half", rule=RULES["async"])
    loss = result["history"]["loss"]
    assert loss[1] < 0.9 * loss[0]
    assert result["iterations"] == 64
