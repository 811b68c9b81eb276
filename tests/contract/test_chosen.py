"""What replicas reduce need not be their share of the examples: masks, choices, own weights."""

from __future__ import annotations

import pytest

from tests.cases.chosen_cases import LOSSES
from tests.contract.conftest import Agree


@pytest.mark.needs("whole batch")
@pytest.mark.parametrize("kind", LOSSES)
def test_a_compiled_loss_of_chosen_examples(agree: Agree, kind: str) -> None:
    agree("chosen_cases:chosen", kind=kind, where="compiled")


@pytest.mark.needs("own steps")
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_of_chosen_examples_in_a_train_step(agree: Agree, kind: str) -> None:
    agree("chosen_cases:chosen", kind=kind, where="step")


@pytest.mark.needs("any model")
@pytest.mark.parametrize("where", ["metric", "layer"])
def test_chosen_examples_elsewhere(agree: Agree, where: str) -> None:
    agree("chosen_cases:chosen", kind="boolean_mask", where=where)


@pytest.mark.needs("any model")
def test_synchronised_statistics_of_masked_sequences(agree: Agree) -> None:
    agree("chosen_cases:masked_normalization")


@pytest.mark.needs("any model")
def test_weights_of_classes_that_are_looked_up_in_the_batch(agree: Agree) -> None:
    agree("chosen_cases:balanced_in_the_batch")


@pytest.mark.needs("own steps")
def test_numbers_of_steps_that_are_weighed_by_hand(agree: Agree) -> None:
    agree("chosen_cases:weighed_by_hand")
