"""ZeRO: shards of the optimizer's state, on TensorFlow's collectives and on Horovod's."""

from __future__ import annotations

import pytest

from tests.contract.conftest import assert_same
from tests.harness import Pool

CASES = "tests.cases.zero_cases"
CHECKED = (
    "infinity_in_one_shard",
    "whole_weights",
    "tied",
    "clipped_rows",
    "regularized",
    "within_control_flow",
)


@pytest.mark.parametrize(
    ("target", "optimizer"),
    [("zero", "adam"), ("zero", "ema"), ("zero3", "ema"), ("horovod_zero", "ema")],
)
def test_a_process_holds_its_part_of_the_state_and_shows_the_whole(
    cluster: Pool, target: str, optimizer: str
) -> None:
    expected = cluster.plain(f"{CASES}:held", optimizer=optimizer)
    for result in cluster(target).call(f"{CASES}:held", optimizer=optimizer):
        assert result["whole"] == expected["whole"]
        assert 2 * result["here"] == result["whole"] + result["indivisible"]
        assert result["indivisible"] < 0.05 * result["whole"]
        assert_same({"state": expected["state"]}, {"state": result["state"]}, 1e-5, target)


@pytest.mark.parametrize(
    ("target", "case"),
    [
        pytest.param(target, case, marks=[] if case in often else pytest.mark.seldom)
        for target, often in {
            **dict.fromkeys(("zero", "zero3", "mesh"), CHECKED),
            "mesh_zero1": ("whole_weights",),
            "mesh_zero3": ("tied",),
        }.items()
        for case in CHECKED
    ],
)
def test_what_needs_more_than_a_shard_is_as_on_one_device(
    cluster: Pool, target: str, case: str
) -> None:
    expected = cluster.plain(f"{CASES}:{case}")
    for worker, result in enumerate(cluster(target).call(f"{CASES}:{case}")):
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor", "own"])
def test_an_optimizer_that_needs_whole_gradients_is_refused(cluster: Pool, optimizer: str) -> None:
    for error in cluster("zero").call(f"{CASES}:refused", optimizer=optimizer):
        assert error.startswith("ConfigError: zero=2 conflicts with the optimizer ")
        assert "Choose one of these, or leave the option out." in error


@pytest.mark.parametrize("kind", ["clip", "update", "norm"])
def test_a_step_that_computes_with_gradients_is_refused(cluster: Pool, kind: str) -> None:
    for error in cluster("zero3").call(f"{CASES}:computes_with_gradients", kind=kind):
        assert "zero=3 conflicts with the train_step of Computing, which reads or changes" in error


def test_weights_are_kept_in_parts(cluster: Pool) -> None:
    for result in cluster("zero3").call(f"{CASES}:weights_held"):
        assert result["whole"] == [128, 16, 48, 3]
        assert result["here"] == [64, 8, 24, 3]
        assert "zero=3 conflicts with a tf.function" in result["in a function"]
        assert "model.export conflicts with zero=3" in result["exported"]


def test_state_that_one_process_reads_alone_is_named(cluster: Pool) -> None:
    for error in cluster("zero").call(f"{CASES}:read_on_one"):
        assert 'The workers are at different places of the program: worker 0 at "reading ' in error
