"""`predict` gives every row once and in order; methods on one batch do as on one process."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Agree


@pytest.mark.needs("any model")
def test_predict_gives_every_row_once_and_in_order(agree: Agree) -> None:
    agree("batch_cases:predict", tolerance=0.0)


@pytest.mark.needs("own steps")
def test_predictions_may_have_any_type(agree: Agree) -> None:
    agree("batch_cases:predicted_types")


@pytest.mark.needs("any model")
def test_predictions_may_have_any_number_of_rows(agree: Agree) -> None:
    agree("batch_cases:predicted_rows", tolerance=0.0)


@pytest.mark.core("predict and evaluate")
def test_predict_and_evaluate_with_several_steps_per_execution(agree: Agree) -> None:
    agree("batch_cases:predict_steps_per_execution")


def test_methods_on_one_batch(agree: Agree) -> None:
    agree("batch_cases:on_batch")


@pytest.mark.needs("own steps")
def test_methods_on_one_batch_return_the_loss_of_an_own_step(agree: Agree) -> None:
    agree("batch_cases:returned_losses")


def test_methods_on_one_batch_of_a_lazy_model(agree: Agree) -> None:
    agree("batch_cases:on_batch_lazy")


def test_calling_the_model(agree: Agree) -> None:
    agree("batch_cases:called")


@pytest.mark.needs("whole batch")
@pytest.mark.parametrize(
    "kind", ["sparse", "ragged", "looked up", "padded", "padded by a list", "padded by a tensor"]
)
def test_methods_on_one_batch_that_is_not_dense(agree: Agree, kind: str) -> None:
    agree("batch_cases:on_batch_of", kind=kind)


@pytest.mark.needs("replicas")
def test_metrics_are_set_to_zero_without_an_exchange(run: Agree) -> None:
    for result in run("batch_cases:reset"):
        assert result["sums"] == []
        assert set(result["shown"]) == {0.0}
