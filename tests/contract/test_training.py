"""Fifty steps on every strategy give the weights, losses and metrics of one process, to 1e-5."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest

from tests.cases.common import BATCH, ONE_LEFT, UNEVEN
from tests.contract.conftest import Agree, assert_same
from tests.harness import Pool

TRAIN = "contract_cases:train"


def core(*values: Any, of: str) -> Any:
    """Parameters with which a test runs on every strategy, and the capability that it shows."""
    return pytest.param(*values, marks=pytest.mark.core(of))


def whole(*values: Any, marks: Sequence[pytest.MarkDecorator] = ()) -> Any:
    """Parameters of a model with statistics of a batch."""
    return pytest.param(*values, marks=[pytest.mark.needs("whole batch"), *marks])


@pytest.mark.parametrize(
    ("model", "more", "optimizer"),
    [
        core("dense", UNEVEN, "sgd", of="optimizers"),
        core("dense", UNEVEN, "adam", of="optimizers"),
        ("dense", UNEVEN, "momentum"),
        whole("conv", ONE_LEFT, "adam"),
        ("embedding", UNEVEN, "sgd"),
        ("embedding", UNEVEN, "adam"),
        # An optimizer does not see which model its dense gradients come from.
        whole("conv", ONE_LEFT, "sgd", marks=[pytest.mark.seldom]),
        whole("conv", ONE_LEFT, "momentum", marks=[pytest.mark.seldom]),
        pytest.param("embedding", UNEVEN, "momentum", marks=pytest.mark.seldom),
    ],
)
def test_fifty_steps(agree: Agree, model: str, optimizer: str, more: int) -> None:
    """Two epochs of 25, since an epoch costs more than its steps; or five, for more rests."""
    given = {"examples": more, "epochs": 5} if model == "conv" else {"examples": 15 * BATCH + more}
    results = agree(TRAIN, model=model, optimizer=optimizer, **{"epochs": 2, **given})
    assert {r["iterations"] for r in results} == {50}


@pytest.mark.parametrize(
    ("model", "examples"),
    [core("dense", ONE_LEFT, of="uneven batches"), ("embedding", ONE_LEFT)],
)
def test_last_batch_of_one_example(agree: Agree, model: str, examples: int) -> None:
    agree(TRAIN, model=model, optimizer="adam", examples=examples, epochs=2)


@pytest.mark.core("large weights")
def test_large_and_small_weights(agree: Agree) -> None:
    agree(TRAIN, model="wide", optimizer="adam", examples=UNEVEN, epochs=1)


@pytest.mark.parametrize(
    "options",
    [
        {"clipnorm": 0.05},
        {"global_clipnorm": 0.1},
        {"clipvalue": 0.01},
        {"use_ema": True, "ema_momentum": 0.9},
        {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 7},
        core({"gradient_accumulation_steps": 3}, of="accumulation"),
    ],
    ids=lambda options: "-".join(options),
)
def test_optimizer_options(agree: Agree, options: dict[str, Any]) -> None:
    agree(TRAIN, optimizer="momentum", options=options, epochs=2)


#: `MultiOptimizer` came with Keras 3.15.
SEVERAL = (
    [pytest.param("several", marks=pytest.mark.needs("any optimizer"))]
    if hasattr(keras.optimizers, "MultiOptimizer")
    else []
)


@pytest.mark.parametrize("optimizer", ["schedule_free", "nadam", *SEVERAL])
def test_optimizers_that_keep_more_than_slots(agree: Agree, optimizer: str) -> None:
    """Products of momenta, sums of rates, optimizers within: made when the optimizer is built."""
    # Plain Keras forgets what ScheduleFreeAdamW assigns when it is built within a step.
    agree(TRAIN, optimizer=optimizer, epochs=2, built=optimizer == "schedule_free")


def test_accumulation_of_sparse_gradients(agree: Agree) -> None:
    agree(
        TRAIN,
        model="embedding",
        optimizer="adam",
        epochs=2,
        options={"gradient_accumulation_steps": 2},
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_position_embedding(agree: Agree, optimizer: str) -> None:
    agree(TRAIN, model="position", optimizer=optimizer, epochs=2)


@pytest.mark.parametrize(
    ("vocabulary", "optimizer"),
    [
        (1, "Adam"),
        core(2, "Adam", of="shared lookups"),
        (3, "Adam"),
        (2, "RMSprop"),
        (2, "Adagrad"),
        # What an optimizer does with a sum of rows does not depend on the number of ids.
        *(
            pytest.param(ids, optimizer, marks=pytest.mark.seldom)
            for ids in (1, 3)
            for optimizer in ("RMSprop", "Adagrad")
        ),
    ],
)
def test_few_ids_that_replicas_look_up_alike(agree: Agree, vocabulary: int, optimizer: str) -> None:
    agree("contract_cases:lookups", how="tokens", vocabulary=vocabulary, optimizer=optimizer)


@pytest.mark.parametrize("how", ["twice", "concatenated"])
def test_one_table_for_tokens_and_positions(agree: Agree, how: str) -> None:
    agree("contract_cases:lookups", how=how, vocabulary=3)


def test_weight_decay(agree: Agree) -> None:
    agree(TRAIN, optimizer="adamw", epochs=2)


def test_steps_per_execution(agree: Agree) -> None:
    results = agree(TRAIN, optimizer="momentum", compiled={"steps_per_execution": 4}, epochs=2)
    assert {r["iterations"] for r in results} == {20}


def test_fit_outside_of_the_scope(agree: Agree) -> None:
    agree(TRAIN, optimizer="momentum", epochs=2, inside=False)


def test_model_built_by_its_first_batch(agree: Agree) -> None:
    agree(TRAIN, model="lazy", optimizer="adam", epochs=2)


def test_shuffle_sees_the_order_of_one_process(agree: Agree) -> None:
    agree(TRAIN, optimizer="momentum", shuffle=True, epochs=2)


@pytest.mark.parametrize(
    ("start", "growth"), [(3e38, 2000), (1024.0, 5)], ids=["overflow", "growth"]
)
def test_loss_scale(agree: Agree, start: float, growth: int) -> None:
    results = agree("contract_cases:loss_scale", start=start, growth=growth)
    assert all(result["scale"] != start for result in results)


@pytest.mark.parametrize(
    "options",
    [core({}, of="mixed precision"), {"target": 3e4}, {"growth": 5}, {"built": False}],
    ids=["", "overflow", "growth", "lazy"],
)
def test_mixed_float16(run: Agree, cluster: Pool, options: dict[str, Any]) -> None:
    case = "contract_cases:mixed_precision"
    results = run(case, plain=True, policy="mixed_float16", **options)
    expected = cluster.plain(f"tests.cases.{case}", policy="mixed_float16", **options)
    # A sum of halves may overflow where neither half does: the scale is the same but for a step.
    for result in results:
        assert_same(results[0], result, 0.0, "another worker")
        ratio = result["scale"]["dynamic_scale"] / expected["scale"]["dynamic_scale"]
        assert ratio in (0.25, 0.5, 1.0, 2.0, 4.0), result["scale"]
        assert abs(result["scale"]["iterations"] - expected["scale"]["iterations"]) <= 3
        first, last = result["history"]["loss"][0], result["history"]["loss"][-1]
        fell, falls = expected["history"]["loss"][-1] / expected["history"]["loss"][0], last / first
        assert falls < 1.2 * fell + 0.05, result["history"]


def test_mixed_bfloat16(run: Agree) -> None:
    results = run("contract_cases:mixed_precision", policy="mixed_bfloat16")
    for result in results:
        loss = result["history"]["loss"]
        assert loss[-1] < 0.8 * loss[0]
        assert_same(results[0], result, 0.0, "another worker")


@pytest.mark.core("saving")
def test_a_file_is_loaded_and_trained_on(agree: Agree, shared_directory: pathlib.Path) -> None:
    agree("contract_cases:saved", directory=str(shared_directory))


@pytest.mark.needs("whole batch")
def test_replicas_draw_different_dropout_masks(run: Agree) -> None:
    results = run("contract_cases:dropout_masks", plain=True)
    kernel = results[0]["weights"][0]
    kept_by_one = float(np.mean(np.isclose(kernel, -1.0)))
    assert 0.4 < kept_by_one < 0.6
    for result in results[1:]:
        assert_same(results[0], result, 0.0, "another worker")


@pytest.mark.needs("replicas")
def test_statistics_that_are_not_synchronised_agree_after_each_step(run: Agree) -> None:
    replicas = [r for result in run("contract_cases:local_statistics") for r in result["replicas"]]
    for other in replicas[1:]:
        assert_same(replicas[0], other, 0.0, "another replica")


def test_variables_as_numbers(agree: Agree) -> None:
    agree("contract_cases:variables_as_numbers")
