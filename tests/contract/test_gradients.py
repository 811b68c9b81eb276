"""Steps and optimizers that compute with gradients before they are applied."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Agree, assert_same
from tests.harness import Pool

pytestmark = pytest.mark.needs("whole gradients")


@pytest.mark.parametrize("method", ["apply", "apply_gradients"])
@pytest.mark.parametrize("built", [True, False], ids=["built", "lazy"])
def test_optimizers_that_change_gradients_themselves(
    agree: Agree, method: str, built: bool
) -> None:
    agree("gradient_cases:own_optimizer", method=method, built=built)


@pytest.mark.needs("own steps")
@pytest.mark.parametrize("kind", ["sharpness", "norm", "penalty", "balance", "twice"])
def test_steps_that_compute_with_gradients(agree: Agree, kind: str) -> None:
    agree("gradient_cases:own_step", kind=kind)


@pytest.mark.parametrize("name", ["mirrored", "multi_worker"])
def test_gradients_are_weighed_by_way_of_the_loss_where_all_have_as_many_examples(
    cluster: Pool, name: str
) -> None:
    case = "tests.cases.gradient_cases:weighed"
    for examples, own, are_weighed in ((32, False, False), (29, False, True), (32, True, True)):
        expected = cluster.plain(case, examples=examples, own=own)["weights"]
        for result in cluster(name).call(case, examples=examples, own=own):
            assert (2 in result["ranks"]) is are_weighed
            assert_same(expected, result["weights"], 1e-5, name)
