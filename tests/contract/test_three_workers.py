"""Three workers: no batch of 32 splits evenly, and two of them sit out a batch of one example."""

from __future__ import annotations

import pytest

from tests.cases.common import ONE_LEFT
from tests.contract.conftest import Agree


@pytest.fixture
def target() -> str:
    """The cluster of three processes."""
    return "multi_worker3"


def test_training(agree: Agree) -> None:
    agree("contract_cases:train", model="conv", optimizer="momentum", examples=ONE_LEFT, epochs=2)


def test_coverage(agree: Agree) -> None:
    results = agree("data_cases:coverage", kind="arrays_shuffled")
    assert results[0]["history"]["once"] == [1.0, 1.0]


def test_predict(agree: Agree) -> None:
    agree("batch_cases:predict_steps_per_execution")
