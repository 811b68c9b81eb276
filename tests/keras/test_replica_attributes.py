"""What layers keep in attributes, on replicas that are threads of one process."""

from __future__ import annotations

import pytest

from tests.contract.conftest import assert_same
from tests.harness import CallError, Pool

CASES = "tests.cases.loss_cases"


def test_replicas_that_take_turns_keep_their_own_added_losses(cluster: Pool) -> None:
    expected = cluster.plain(f"{CASES}:added", how="regularizer", pairs=True)
    for result in cluster("mirrored").call(f"{CASES}:added", how="regularizer", pairs=True):
        assert_same(expected, result, 1e-5, "mirrored")


def test_so_do_replicas_of_a_loop_written_by_hand(cluster: Pool) -> None:
    expected = cluster.plain(f"{CASES}:added_in_a_loop")
    for result in cluster("mirrored").call(f"{CASES}:added_in_a_loop"):
        assert_same(expected, result, 1e-5, "mirrored")


@pytest.mark.parametrize(
    "where", ["attribute", "list", pytest.param("dictionary", marks=pytest.mark.seldom), "eager"]
)
def test_a_step_reads_what_its_own_call_has_left_in_a_layer(cluster: Pool, where: str) -> None:
    expected = cluster.plain(f"{CASES}:kept", where=where)
    for result in cluster("mirrored").call(f"{CASES}:kept", where=where):
        assert_same(expected, result, 1e-5, "mirrored")


def test_what_replicas_leave_in_another_object_is_refused(cluster: Pool) -> None:
    with pytest.raises(CallError, match=r"which replica 1 has computed from its own examples"):
        cluster("mirrored").call(f"{CASES}:kept", where="object")
