"""Update modes on the collectives: what one process simulates, to 1e-5."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from tests.cases.common import BATCH, UNEVEN
from tests.contract.conftest import Agree, assert_same
from tests.harness import CallError, Pool

TRAIN = "update_cases:train"

pytestmark = pytest.mark.needs("collectives")
# A checkpoint and a report are made of what the replicas have in one process, or in several.
TWICE = pytest.mark.turns("test", "all")


#: Compressions that also run eagerly.
EAGER = ("topk",)


@pytest.mark.parametrize(
    "rule",
    [
        {"mode": "stale"},
        {"mode": "stale", "staleness": 3},
        {"mode": "stale", "staleness": 2, "on_stale": "damp"},
        {"mode": "stale", "accumulate": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.seldom)])
def test_gradients_are_applied_late(agree: Agree, rule: dict[str, Any], optimizer: str) -> None:
    """Fifty updates and more; the last gradients are applied at the end."""
    epochs = 5 if rule.get("accumulate", 1) == 1 else 6
    results = agree(TRAIN, rule=rule, optimizer=optimizer, examples=UNEVEN, epochs=epochs)
    assert {r["iterations"] for r in results} == {50 if epochs == 5 else 30}


def test_late_gradients_are_applied_before_an_evaluation(agree: Agree) -> None:
    rule = {"mode": "stale", "staleness": 2}
    agree(TRAIN, rule=rule, optimizer="momentum", examples=UNEVEN, validate=True)


def test_no_delay_is_sync_to_the_bit(run: Agree) -> None:
    late = run(TRAIN, rule={"mode": "stale", "staleness": 0}, examples=UNEVEN)
    sync = run(TRAIN, rule={}, examples=UNEVEN)
    assert_same(sync, late, 0.0, "staleness 0")


@pytest.mark.parametrize(
    "case",
    [
        {"rule": {"period": 1}},
        {"rule": {"period": 4}, "optimizer": "adam", "epochs": 5},
        {"rule": {"period": 3, "sync_steps": 4}, "optimizer": "momentum"},
        {"rule": {"period": 5, "outer_momentum": 0.9, "outer_lr": 0.7}, "epochs": 4},
        {"rule": {"period": 4, "average_state": True}, "optimizer": "adam"},
        {"rule": {"period": 3}, "optimizer": "momentum", "model": "normalized"},
    ],
    ids=lambda case: "-".join(map(str, [*case["rule"].items(), case.get("model", "")])),
)
def test_local_steps(agree: Agree, case: dict[str, Any]) -> None:
    rule = {"mode": "local", **case["rule"]}
    agree(TRAIN, **{"examples": UNEVEN, **case, "rule": rule})


def test_an_average_after_each_step_of_sgd_is_sync(run: Agree) -> None:
    local = run(TRAIN, rule={"mode": "local", "period": 1}, examples=UNEVEN)
    sync = run(TRAIN, rule={}, examples=UNEVEN)
    assert_same(sync, local, 1e-5, "period 1")


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_batches_are_a_large_batch(agree: Agree, accumulate: int) -> None:
    """Of 13 batches an epoch the last update has fewer; `evaluate` sees the weights after it."""
    agree("update_cases:large_batch", accumulate=accumulate)


def test_accumulation_on_one_device(cluster: Pool) -> None:
    case = "tests.cases.update_cases:large_batch"
    reference = cluster.plain(case, accumulate=3)
    assert_same(reference, cluster.results("single", case, accumulate=3)[0], 1e-5, "single")


def test_local_steps_average_what_the_optimizer_averages(run: Agree) -> None:
    options = {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.9}
    results = run(TRAIN, rule={"mode": "local", "period": 2}, examples=UNEVEN, options=options)
    for result in results:
        assert_same(results[0], result, 0.0, "another worker")


def test_buckets_change_nothing(agree: Agree) -> None:
    agree(TRAIN, rule={"bucket_mb": 600 / 2**20}, examples=UNEVEN, optimizer="adam")


@pytest.mark.parametrize("kind", ["adversarial_clipped", "taken_back", "gradients_by_hand"])
@pytest.mark.parametrize("rule", [{"bucket_mb": 400 / 2**20}, {"report": True}], ids=str)
def test_steps_that_compute_with_gradients(agree: Agree, kind: str, rule: dict[str, Any]) -> None:
    agree("update_cases:own_step", kind=kind, rule=rule)


def test_gradients_that_a_step_computes_by_hand(agree: Agree) -> None:
    """They are the whole batch's before a rule sees them."""
    rule = {"lr_rule": "linear", "base_batch": BATCH}
    agree("update_cases:own_step", kind="gradients_by_hand", rule=rule)


def test_buckets_of_halves_overflow_as_on_one_device(agree: Agree) -> None:
    agree("update_cases:halves", rule={"bucket_mb": 1e-4}, tolerance=1e-2)


@pytest.mark.parametrize("kind", ["adversarial_clipped", "taken_back"])
def test_steps_that_compute_with_gradients_of_a_replica_are_named(run: Agree, kind: str) -> None:
    for result in run("update_cases:own_step", kind=kind, rule={"compression": "bf16"}):
        assert result["named"]


@pytest.mark.parametrize(
    "rule",
    [
        {"bucket_mb": 400 / 2**20},
        {"mode": "stale"},
        {"mode": "local", "period": 2},
        {"accumulate": 2},
    ],
    ids=str,
)
def test_sparse_gradients(agree: Agree, rule: dict[str, Any]) -> None:
    epochs = 2 if rule.get("accumulate", 1) == 1 else 3
    agree(TRAIN, rule=rule, model="embedding", examples=UNEVEN, epochs=epochs)


def test_sparse_gradients_beside_compressed_ones(run: Agree) -> None:
    results = run(TRAIN, rule={"compression": "bf16"}, model="embedding", examples=UNEVEN)
    sync = run(TRAIN, rule={}, model="embedding", examples=UNEVEN)
    for result in results:
        assert_same(results[0], result, 0.0, "another worker")
        assert_same(sync[0], result, 2e-3, "bf16")


@pytest.mark.parametrize(
    "rule", [{"compression": "topk", "ratio": 1.0}, {"mode": "stale"}, {"accumulate": 2}], ids=str
)
def test_gradients_without_a_static_shape(agree: Agree, rule: dict[str, Any]) -> None:
    epochs = 2 if rule.get("accumulate", 1) == 1 else 3
    agree(TRAIN, rule=rule, model="product", examples=UNEVEN, epochs=epochs)


def test_the_learning_rate_follows_the_batch(run: Agree) -> None:
    rule = {"lr_rule": "linear", "base_batch": 8}
    larger = run(TRAIN, rule=rule, examples=UNEVEN, options={"learning_rate": 0.025})
    sync = run(TRAIN, rule={}, examples=UNEVEN, options={"learning_rate": 0.1})
    assert_same(sync, larger, 1e-5, "4 times the rate")
    root = run(TRAIN, rule={**rule, "lr_rule": "sqrt"}, options={"learning_rate": 0.05})
    assert_same(run(TRAIN, rule={}, options={"learning_rate": 0.1}), root, 1e-5, "the root")


@TWICE
@pytest.mark.parametrize("rule", [{}, {"mode": "stale"}, {"bucket_mb": 600 / 2**20}], ids=str)
def test_a_report_tells_the_parts_of_a_step(
    run: Agree, shared_directory: pathlib.Path, rule: dict[str, Any], target: str
) -> None:
    first, *others = run("update_cases:reported", rule=rule, directory=str(shared_directory))
    parts = first["history"]
    assert parts["step_ms"] > parts["compute_ms"] > 0
    assert parts["exchange_waited_ms"] + parts["exchange_hidden_ms"] > 0
    weights = 8 * 16 + 16 + 16 * 3 + 3
    assert parts["sent_bytes_per_step"] == 4 * weights  # 2 n (p - 1) / p, and p is 2
    assert {"step_ms", "input_ms", "sent_bytes_per_step"} <= set(first["board"])
    assert "where the time of a step went" in first["said"]
    assert not any("where the time" in other["said"] for other in others)


@pytest.mark.parametrize("options", [{"global_clipnorm": 0.1}, {"clipvalue": 0.01}], ids=str)
def test_clipping_after_the_exchange_is_one_device_s(
    agree: Agree, run: Agree, options: dict[str, Any]
) -> None:
    after = agree(TRAIN, rule={}, examples=UNEVEN, options=options)
    before = run(TRAIN, rule={"clip": "before"}, examples=UNEVEN, options=options)
    apart = np.abs(after[0]["weights"][0] - before[0]["weights"][0]).max()
    assert apart > 1e-4, "clipping each replica's own gradients should differ"
    assert_same(before[0], before[-1], 0.0, "the last worker")


@pytest.mark.parametrize(
    ("kind", "eager"),
    [
        # Eagerly as in a graph: one, which has a memory; all in `make test-everything`.
        pytest.param(kind, eager, marks=[pytest.mark.seldom] * (eager and kind not in EAGER))
        for kind in ("bf16", "fp16", "int8", "topk", "randomk", "powersgd")
        for eager in (False, True)
    ],
)
def test_compressed_training_is_alike_everywhere_and_near(
    run: Agree, kind: str, eager: bool
) -> None:
    rule = {"compression": kind, **({"ratio": 0.3} if kind in ("topk", "randomk") else {})}
    results = run(TRAIN, plain=True, rule=rule, examples=UNEVEN, epochs=3, eager=eager)
    sync = run(TRAIN, rule={}, examples=UNEVEN, epochs=3)
    for result in results:
        assert_same(results[0], result, 0.0, "another worker")
        within = 2e-3 if kind in ("bf16", "fp16", "int8") else 0.1
        assert result["loss"][-1] == pytest.approx(sync[0]["loss"][-1], rel=within)


@pytest.mark.parametrize(
    "rule",
    [
        {"mode": "stale", "compression": "powersgd", "accumulate": 2},
        {"mode": "local", "period": 3, "compression": "int8"},
    ],
    ids=str,
)
def test_parts_of_a_rule_go_together(run: Agree, rule: dict[str, Any]) -> None:
    results = run(TRAIN, rule=rule, examples=UNEVEN, epochs=4)
    losses = results[0]["loss"]
    assert losses[-1] < losses[0] - 0.1
    for result in results:
        assert_same(results[0], result, 0.0, "another worker")


@TWICE
@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"mode": "stale", "staleness": 2},
        {"mode": "local", "period": 3, "outer_momentum": 0.9, "average_state": True},
        {"compression": "powersgd", "rank": 2},
    ],
    ids=str,
)
def test_a_checkpoint_holds_what_the_rule_keeps(
    run: Agree, shared_directory: pathlib.Path, rule: dict[str, Any]
) -> None:
    for result in run("update_cases:resumed", rule=rule, directory=str(shared_directory)):
        # A replica's error feedback becomes its part of the sum, so rounding differs.
        assert_same(result["whole"], result["loaded"], 1e-4, "the loaded model")
        assert bool(result["kept"]) == ("compression" in rule or "outer_momentum" in rule)


@TWICE
def test_a_checkpoint_of_another_rule_is_refused(
    run: Agree, shared_directory: pathlib.Path
) -> None:
    messages = run(
        "update_cases:load_other",
        first={"compression": "topk", "ratio": 0.1},
        then={"compression": "powersgd"},
        directory=str(shared_directory),
    )
    for message in messages:
        assert message.startswith("ConfigError")
        assert "compression=topk" in message
        assert "compression=powersgd rank=4" in message


@pytest.mark.parametrize(
    ("where", "rule"),
    [
        ("closure", {"mode": "local", "period": 3}),
        ("closure", {"accumulate": 3}),
        ("list", {"mode": "local", "period": 3}),
        ("dict", {"mode": "stale"}),
        ("loop", {"mode": "stale"}),
        ("loop", {"accumulate": 3}),
        ("loop", {"mode": "local", "period": 3}),
    ],
    ids=str,
)
def test_an_optimizer_is_flushed_wherever_it_is_held(
    run: Agree, where: str, rule: dict[str, Any]
) -> None:
    expected = run("update_cases:held_by", rule=rule, where="model.optimizer")
    for weights in run("update_cases:held_by", rule=rule, where=where):
        assert_same({"weights": expected[0]}, {"weights": weights}, 1e-6, where)


@pytest.mark.parametrize(
    "rule",
    [{"mode": "local", "period": 3, "outer_momentum": 0.9}, {"mode": "stale"}, {"accumulate": 3}],
    ids=str,
)
def test_a_new_optimizer_begins_with_all_updates_of_the_old_one(
    run: Agree, rule: dict[str, Any]
) -> None:
    expected = run("update_cases:recompiled", rule=rule, flushed=True)
    for weights in run("update_cases:recompiled", rule=rule, flushed=False):
        assert_same({"weights": expected[0]}, {"weights": weights}, 1e-6, "flushed")


def test_local_steps_of_two_optimizers(run: Agree) -> None:
    rule = {"mode": "local", "period": 3}
    first, *others = run("update_cases:updated_twice", rule=rule, apart=True)
    for weights in others:
        assert_same({"weights": first}, {"weights": weights}, 1e-6, "another replica's")
    with pytest.raises(CallError, match=r"mode='local' conflicts with two optimizers"):
        run("update_cases:updated_twice", rule=rule, apart=False)
