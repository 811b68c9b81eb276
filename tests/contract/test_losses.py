"""Losses, their reductions and metrics equal one process's on every worker."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Agree

CASES = "contract_cases"


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
def test_reductions(agree: Agree, reduction: str, weighted: bool) -> None:
    loss = "huber" if reduction == "sum" else "mse"
    agree(f"{CASES}:regression", loss=loss, reduction=reduction, weighted=weighted)


def test_class_weights(agree: Agree) -> None:
    agree(f"{CASES}:class_weights")


@pytest.mark.parametrize("per_token", [False, True], ids=["per_sequence", "per_token"])
def test_masks(agree: Agree, per_token: bool) -> None:
    agree(f"{CASES}:masked", per_token=per_token)


def test_several_outputs(agree: Agree) -> None:
    agree(f"{CASES}:several_outputs")


def test_regularizers_and_added_losses(agree: Agree) -> None:
    agree(f"{CASES}:added_losses")


def test_metrics_that_are_no_means(agree: Agree) -> None:
    agree(f"{CASES}:metrics")
