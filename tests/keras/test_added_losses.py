"""Losses that layers add, on replicas that are threads of one process."""

from __future__ import annotations

from tests.contract.conftest import assert_same
from tests.harness import Pool

CASES = "tests.cases.loss_cases"


def test_replicas_that_take_turns_keep_their_own_added_losses(cluster: Pool) -> None:
    expected = cluster.plain(f"{CASES}:added", how="regularizer", pairs=True)
    for result in cluster("mirrored").call(f"{CASES}:added", how="regularizer", pairs=True):
        assert_same(expected, result, 1e-5, "mirrored")


def test_so_do_replicas_of_a_loop_written_by_hand(cluster: Pool) -> None:
    expected = cluster.plain(f"{CASES}:added_in_a_loop")
    for result in cluster("mirrored").call(f"{CASES}:added_in_a_loop"):
        assert_same(expected, result, 1e-5, "mirrored")
