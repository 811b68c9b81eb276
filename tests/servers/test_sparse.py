"""Sparse gradients of parts of a batch make one process's gradient of the whole batch."""

from __future__ import annotations

import pytest

from tests.contract.conftest import assert_same
from tests.harness import Pool
from tests.harness.tiers import seldom

CASES = "tests.cases.sparse_cases"


@pytest.mark.parametrize("optimizer", ["adam", *seldom("rmsprop"), "adagrad"])
@pytest.mark.parametrize("vocabulary", [2, *seldom(3)])
def test_an_embedding_of_few_categories(cluster: Pool, vocabulary: int, optimizer: str) -> None:
    given = {"vocabulary": vocabulary, "optimizer": optimizer}
    expected = cluster.plain(f"{CASES}:categories", **given)
    [result] = cluster("parameter_server").call(f"{CASES}:categories", **given)
    assert_same(expected, result, 1e-5, "parameter_server")


@pytest.mark.parametrize("way", ["static", "dynamic", "tiled", "zeros", "shared"])
def test_an_embedding_of_places(cluster: Pool, way: str) -> None:
    """Ids are the same on all parts, or of each example; the table may be that of the tokens."""
    expected = cluster.plain(f"{CASES}:places", way=way)
    [result] = cluster("parameter_server").call(f"{CASES}:places", way=way)
    assert_same(expected, result, 1e-5, "parameter_server")
