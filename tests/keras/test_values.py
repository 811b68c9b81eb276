"""Batches that are given as values: computed alone where they are small, compared where not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.conftest import assert_same
from tests.harness import Pool
from tests.harness.tiers import seldom

CASES = "tests.cases.batch_cases"


@pytest.mark.parametrize("target", ["multi_worker", "horovod"])
def test_one_row_is_predicted_without_the_other_workers(cluster: Pool, target: str) -> None:
    chief, other = cluster(target).call(f"{CASES}:one_row_on_one_worker")
    assert len(chief["alone"]) == 2
    for alone in (*chief["alone"], chief["own"], other["zeros"]):
        np.testing.assert_allclose(alone, chief["zeros"], atol=1e-6)
    assert not np.allclose(other["own"], chief["own"])


@pytest.mark.parametrize("method", ["predict", "train_on_batch", "test_on_batch"])
def test_other_values_on_each_worker_are_refused(cluster: Pool, method: str) -> None:
    for error in cluster("multi_worker").call(f"{CASES}:different_values", method=method):
        assert error.startswith("The workers read different data")
        assert error.endswith("untrained")


@pytest.mark.parametrize("target", ["multi_worker", *seldom("mirrored", "horovod")])
def test_predictions_of_few_rows(cluster: Pool, target: str) -> None:
    expected = cluster.plain(f"{CASES}:few_rows")
    for worker, result in enumerate(cluster(target).call(f"{CASES}:few_rows")):
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize("target", ["multi_worker", *seldom("mirrored")])
def test_eager_predictions_may_have_any_number_of_rows(cluster: Pool, target: str) -> None:
    expected = cluster.plain(f"{CASES}:predicted_rows", run_eagerly=True)
    for result in cluster(target).call(f"{CASES}:predicted_rows", run_eagerly=True):
        assert_same(expected, result, 0.0, target)


@pytest.mark.parametrize("target", ["multi_worker", *seldom("mirrored", "horovod")])
def test_replicas_gather_rows_of_any_type_and_none(cluster: Pool, target: str) -> None:
    """TensorFlow's gather ends in a segmentation fault if there are no rows."""
    for found in cluster(target).call(f"{CASES}:gathered_types"):
        for case, values in found.items():
            name, rows = case.split()
            expected = [0, 1, 1, 1] if name == "bool" else [0, 1, 4, 5]
            for value in values:
                assert value == (expected if rows == "2" else []), case


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("mirrored", "train_on_batch"),
        ("multi_worker", "train_on_batch"),
        ("multi_worker", "test_on_batch"),
        ("multi_worker", "predict"),
        ("horovod", "predict_on_batch"),
        ("parameter_server", "train_on_batch"),
        ("parameter_server", "predict_on_batch"),
    ],
)
def test_batches_of_many_lengths_are_traced_twice(cluster: Pool, target: str, method: str) -> None:
    """Stock Keras traces the model once for the first length and once for all others."""
    expected = cluster.plain(f"{CASES}:lengths", method=method)
    assert expected["traced"] == 2
    for worker, result in enumerate(cluster(target).call(f"{CASES}:lengths", method=method)):
        replicas_here = 2 if target == "mirrored" else 1
        assert result.pop("traced") <= 2 * replicas_here
        for key in result:
            assert_same(expected[key], result[key], 1e-5, f"worker {worker}")
