"""Stateful RNNs: each replica goes on from the states of its own rows."""

from __future__ import annotations

import pytest

from tests.contract.conftest import assert_same
from tests.harness import CallError, Pool

CASES = "tests.cases.step_cases"


@pytest.mark.turns("all")
@pytest.mark.parametrize("target", ["single", "mirrored", "multi_worker", "horovod"])
@pytest.mark.parametrize("given", ["input", "lazy"])
def test_states_go_on_as_on_one_device(cluster: Pool, target: str, given: str) -> None:
    expected = cluster.plain(f"{CASES}:stateful", given=given)
    for worker, result in enumerate(cluster(target).call(f"{CASES}:stateful", given=given)):
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize("target", ["mirrored", "multi_worker"])
def test_one_sequence_is_generated_step_by_step(cluster: Pool, target: str) -> None:
    expected = cluster.plain(f"{CASES}:stateful_one_row")
    for worker, result in enumerate(cluster(target).call(f"{CASES}:stateful_one_row")):
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize(
    "method", ["fit", "fit lazily", "train_on_batch", "predict_on_batch", "predict"]
)
def test_unequal_slices_are_refused(cluster: Pool, method: str) -> None:
    for error in cluster("multi_worker").call(f"{CASES}:stateful_uneven", method=method):
        assert "Each replica keeps the states of its own rows" in error


@pytest.mark.parametrize("given", ["input", "lazy"])
def test_parameter_servers_refuse_states(cluster: Pool, given: str) -> None:
    with pytest.raises(CallError, match=r"has a stateful RNN, which conflicts with strategy='par"):
        cluster("parameter_server").call(f"{CASES}:stateful", given=given)
