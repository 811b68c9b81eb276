"""Cases of the contract suite on a pipeline of two stages: what makes sense of a model in stages.

Models of one layer, of subclasses and with steps of their own cannot be cut; batches are to be
divided by four; BatchNormalization takes the statistics of a microbatch.
"""

from __future__ import annotations

import pytest

from tests.contract.conftest import TOLERANCE, assert_same

TRAIN = "contract_cases:train"

CASES = {
    "rows": (TRAIN, {"model": "embedding", "optimizer": "adam", "epochs": 2}),
    "average": (
        TRAIN,
        {"optimizer": "sgd", "epochs": 2, "options": {"use_ema": True, "ema_momentum": 0.9}},
    ),
    "accumulated": (
        TRAIN,
        {"optimizer": "adam", "epochs": 2, "options": {"gradient_accumulation_steps": 3}},
    ),
    "lazy": (TRAIN, {"model": "lazy", "optimizer": "adam", "epochs": 2}),
    "outside": (TRAIN, {"inside": False, "epochs": 2, "shuffle": True}),
    "masked": ("contract_cases:masked", {"per_token": True}),
    "several_outputs": ("contract_cases:several_outputs", {}),
    "added_losses": ("contract_cases:added_losses", {}),
    "on_batch": ("batch_cases:on_batch", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_does_what_stock_keras_does(cluster, name):
    function, kwargs = CASES[name]
    cluster.prefetch(["plain", "pipeline"], f"tests.cases.{function}", **kwargs)
    (found,) = cluster.results("pipeline", f"tests.cases.{function}", **kwargs)
    assert_same(cluster.plain(f"tests.cases.{function}", **kwargs), found, TOLERANCE, name)
