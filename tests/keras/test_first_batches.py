"""Workers that would read different batches: made alike where Keras shuffles, else refused."""

from __future__ import annotations

import pytest

from tests.contract.conftest import assert_same
from tests.harness import CallError, Pool

CASES = "tests.cases.data_cases"
PROCESSES = ("multi_worker", "horovod")


@pytest.mark.turns("all")
@pytest.mark.parametrize("target", PROCESSES)
@pytest.mark.parametrize("kind", ["arrays", "sequence", "sequence_two_workers", "seeded"])
def test_keras_shuffles_alike_whatever_was_drawn_before(
    cluster: Pool, target: str, kind: str
) -> None:
    results = cluster(target).call(f"{CASES}:one_draws_more", kind=kind)
    for result in results:
        assert result["history"]["once"] == [1.0, 1.0]
        assert_same(results[0], result, 1e-6, "another worker")


@pytest.mark.turns("all")
@pytest.mark.parametrize("target", PROCESSES)
@pytest.mark.parametrize(
    "kind", ["dataset", "dataset_repeated", "dataset_unknown_length", "generator"]
)
def test_different_batches_are_refused_before_the_first_step(
    cluster: Pool, target: str, kind: str
) -> None:
    for result in cluster(target).call(f"{CASES}:one_draws_more", kind=kind):
        assert "ConfigError: The workers read different data" in result["error"]
        assert "give shuffles a seed" in result["error"]
        assert result["steps"] == 0


@pytest.mark.turns("all")
@pytest.mark.parametrize("kind", ["layer", "draw"])
def test_variables_that_one_worker_makes_are_named(cluster: Pool, kind: str) -> None:
    with pytest.raises(CallError, match="at different places of the program: this one makes the"):
        cluster("multi_worker").call(f"{CASES}:made_on_one", kind=kind)


def test_workers_may_read_their_own_data_with_the_policy_off(cluster: Pool) -> None:
    results = cluster("multi_worker").call(f"{CASES}:one_draws_more", kind="dataset_policy_off")
    assert_same(results[0], results[1], 1e-6, "another worker")


def test_batches_that_differ_from_the_second_epoch_on_are_refused_there(cluster: Pool) -> None:
    for result in cluster("multi_worker").call(f"{CASES}:one_draws_between_epochs"):
        assert "The workers read different data" in result["error"]
        assert result["epochs"] == 1


@pytest.mark.parametrize("worker", [0, 1])
def test_a_data_set_that_fails_on_one_worker_fails_on_all(cluster: Pool, worker: int) -> None:
    for error in cluster("multi_worker").call(f"{CASES}:one_fails_to_read", worker=worker):
        assert "no such file" in error
