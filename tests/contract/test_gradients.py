"""Steps and optimizers that compute with gradients before they are applied."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Agree

pytestmark = pytest.mark.needs("whole gradients")


@pytest.mark.parametrize("method", ["apply", "apply_gradients"])
@pytest.mark.parametrize("built", [True, False], ids=["built", "lazy"])
def test_optimizers_that_change_gradients_themselves(
    agree: Agree, method: str, built: bool
) -> None:
    agree("gradient_cases:own_optimizer", method=method, built=built)


@pytest.mark.needs("own steps")
@pytest.mark.parametrize("kind", ["sharpness", "norm", "penalty", "balance"])
def test_steps_that_compute_with_gradients(agree: Agree, kind: str) -> None:
    agree("gradient_cases:own_step", kind=kind)
