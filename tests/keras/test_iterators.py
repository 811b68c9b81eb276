"""The iterators of past epochs, and those that are read on from epoch to epoch."""

from __future__ import annotations

import pytest

from tests.harness import Pool

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


def test_workers_of_servers_read_on_from_epoch_to_epoch(cluster: Pool) -> None:
    for result in cluster("parameter_server").call(f"{CASES}:coverage", kind="dataset_repeated"):
        assert result["iterations"] == 2 * 6
