"""ZeRO: shards of the optimizer's state, on TensorFlow's collectives and on Horovod's."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from tests.cases.common import BATCH, UNEVEN
from tests.contract.conftest import assert_same
from tests.harness import Pool
from tests.harness.tiers import seldom

CASES = "tests.cases.zero_cases"
CHECKED = (
    "infinity_in_one_shard",
    "whole_weights",
    "tied",
    "clipped_rows",
    "regularized",
    "within_control_flow",
    "centred",
)


@pytest.mark.parametrize(
    ("target", "optimizer"),
    [
        ("zero", "adam"),
        ("zero3", "ema"),
        ("horovod_zero3", "ema"),
        *seldom(("zero", "ema"), ("horovod_zero", "ema")),
    ],
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
            "zero3": CHECKED,
            # A mesh divides the same weights; stages 2 and 3 differ in their gradients.
            "mesh": ("whole_weights", "centred"),
            **dict.fromkeys(("zero", "mesh4", "horovod_zero3", "mesh_zero1", "mesh_zero3"), ()),
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


def test_a_part_that_a_branch_gives_a_value_by_the_examples_is_named(cluster: Pool) -> None:
    for warned in cluster("zero3").call(f"{CASES}:centred_in_branch"):
        assert any("Within a condition or a loop the step gives the weight" in e for e in warned)


@pytest.mark.seldom  # The contract suite trains as long on most of these, beside one process.
def test_fifty_steps_of_divided_models(cluster: Pool, record_property: Any) -> None:
    """Those of one process to 1e-5, uneven batches included; ZeRO's those of replicas to 1e-7."""
    case = "tests.cases.contract_cases:train"
    options = {"optimizer": "adam", "examples": 15 * BATCH + UNEVEN, "epochs": 2}
    alone = cluster.plain(case, **options)
    replicas = cluster("multi_worker").call(case, **options)[0]
    found = {}
    for target in ("zero1", "zero", "zero3", "mesh", "mesh4"):
        results = cluster(target).call(case, **options)
        assert {result["iterations"] for result in results} == {50}
        found[target] = [
            max(_apart(result["weights"], other["weights"]) for result in results)
            for other in (alone, replicas)
        ]
    print(found)
    record_property("apart", found)
    assert max(apart for apart, _ in found.values()) <= 1e-5
    assert max(found[target][1] for target in ("zero1", "zero")) <= 1e-7


def _apart(weights: list[Any], others: list[Any]) -> float:
    pairs = zip(weights, others, strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs)


@pytest.mark.parametrize(
    ("target", "optimizer"),
    [
        ("zero", "adafactor"),
        *seldom(("zero", "scaled")),
        *(
            pytest.param(target, name, marks=pytest.mark.seldom)
            for target in ("zero", "zero1")
            for name in ("lamb", "muon")
        ),
        pytest.param("horovod_zero", "adafactor", marks=pytest.mark.seldom),
    ],
)
def test_optimizers_of_whole_weights_update_each_at_its_owner(
    cluster: Pool, target: str, optimizer: str, tmp_path: pathlib.Path
) -> None:
    """As data parallel training does, also from a file on; each variable is at one process."""
    case, path = f"{CASES}:of_whole_weights", str(tmp_path / "model.keras")
    expected = dict(cluster("multi_worker").call(case, optimizer=optimizer)[0])
    results = cluster(target).call(case, optimizer=optimizer, path=path)
    expected.pop("here")
    here = np.array([result.pop("here") for result in results])
    for worker, result in enumerate(results):
        assert_same(expected, result, 1e-6, f"worker {worker}")
    file = cluster.plain(f"{CASES}:state_of_file", path=path)
    whole = np.array([each.size for each in results[0]["middle"]])
    for own, read in zip(results[0]["middle"], file, strict=True):
        np.testing.assert_array_equal(own, read)
    # Scalars and what belongs to the kernel with a constraint (8, 16) are everywhere.
    owned = here.min(0) == 0
    np.testing.assert_array_equal(here.sum(0)[owned], whole[owned])
    assert whole[~owned].sum() <= 4 * 8 * 16 + 24
    assert abs(np.subtract(*here.sum(1))) <= 0.25 * whole.sum()


@pytest.mark.seldom  # test_sharded.py saves what is divided.
def test_what_has_an_owner_is_saved_in_sharded_files(cluster: Pool, tmp_path: pathlib.Path) -> None:
    case, options = f"{CASES}:of_whole_weights", {"optimizer": "adafactor"}
    expected = dict(cluster("multi_worker").call(case, **options)[0])
    expected.pop("here")
    files = {"path": str(tmp_path / "model.keras"), "checkpoints": "sharded"}
    for worker, result in enumerate(cluster("zero").call(case, **options, **files)):
        result.pop("here")
        assert_same(expected, result, 1e-6, f"worker {worker}")
    index = json.loads((tmp_path / "model.keras/index.json").read_text())
    assert {"data[0] -", "data[1] -"} <= {each["layout"] for each in index["variables"].values()}


@pytest.mark.parametrize("target", ["zero", "zero1"])
def test_an_infinity_at_one_owner_skips_the_step_everywhere(cluster: Pool, target: str) -> None:
    options = {"of_whole_weights": True}
    expected = cluster.plain(f"{CASES}:infinity_in_one_shard", **options)
    for worker, result in enumerate(
        cluster(target).call(f"{CASES}:infinity_in_one_shard", **options)
    ):
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize(
    ("target", "optimizer", "error"),
    [
        ("zero", "own", "zero=2 conflicts with the optimizer Rounded: each process updates a part"),
        ("zero", "clipped", "zero=2 conflicts with the optimizer Clipped: Clipped._clip_gradients"),
        ("zero3", "lamb", "zero=3 conflicts with the optimizer Lamb, which computes with whole"),
    ],
)
def test_an_optimizer_that_needs_whole_gradients_is_refused(
    cluster: Pool, target: str, optimizer: str, error: str
) -> None:
    for message in cluster(target).call(f"{CASES}:refused", optimizer=optimizer):
        assert message.startswith(f"ConfigError: {error}")


def test_weights_in_slices_and_whole_ones_are_not_mixed(cluster: Pool) -> None:
    """Slices can be updated whole, and whole weights not in slices."""
    case, pool = f"{CASES}:another_optimizer", cluster("zero")
    assert pool.call(case, first="lamb", second="adam") == ["", ""]
    for error in pool.call(case, first="adam", second="lamb"):
        assert error.startswith("ConfigError: zero=2 conflicts with the optimizer Lamb, which upda")
    for error in pool.call(f"{CASES}:one_weight"):
        assert "on 2 processes: each of them updates whole weights, and only 1 have one" in error


@pytest.mark.parametrize("kind", ["clip", "update", "norm", "sum", "optimizer"])
def test_a_step_that_computes_with_gradients_is_refused(cluster: Pool, kind: str) -> None:
    reader = "optimizer Centring" if kind == "optimizer" else "train_step of Computing"
    for error in cluster("zero3").call(f"{CASES}:computes_with_gradients", kind=kind):
        assert f"zero=3 conflicts with the {reader}, which reads or changes" in error


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("jacobian", "zero=3 conflicts with tape.jacobian of 'computing/dense/kernel'"),
        ("curvature", "zero=3 conflicts with a gradient of gradients by tf.gradients"),
    ],
)
def test_gradients_that_cannot_be_followed_are_refused(cluster: Pool, kind: str, said: str) -> None:
    for error in cluster("zero3").call(f"{CASES}:computes_with_gradients", kind=kind):
        assert said in error


def test_weights_are_kept_in_parts(cluster: Pool) -> None:
    for result in cluster("zero3").call(f"{CASES}:weights_held"):
        assert result["whole"] == [128, 16, 48, 3]
        assert result["here"] == [64, 8, 24, 3]
        assert "model.export conflicts with zero=3" in result["exported"]


@pytest.mark.parametrize("target", ["zero3", *seldom("mesh", "mesh_zero3")])
def test_functions_outside_of_steps_read_whole_weights(cluster: Pool, target: str) -> None:
    """As programs that generate text do: the weights of each call, not those of the trace."""
    expected = cluster.plain(f"{CASES}:generated")
    for worker, result in enumerate(cluster(target).call(f"{CASES}:generated")):
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize(
    ("kind", "compiled", "said"),
    [
        ("gradient", False, "zero=3 conflicts with a gradient of 'sequential"),
        ("gradient", True, "zero=3 conflicts with a gradient of 'sequential"),
        ("mapped", False, "zero=3 conflicts with a function of a data set"),
        ("assigned", False, ""),
        ("assigned", True, "zero=3 conflicts with a tf.function that assigns 'sequential"),
    ],
)
def test_what_needs_whole_weights_outside_of_steps_is_named(
    cluster: Pool, kind: str, compiled: bool, said: str
) -> None:
    case = f"{CASES}:outside_of_steps"
    for error in cluster("zero3").call(case, kind=kind, compiled=compiled):
        assert said in error
        assert bool(said) is bool(error)


def test_a_gathering_is_traced_for_each_layout_and_not_for_each_weight(cluster: Pool) -> None:
    """Four kernels and four biases; tracing takes longer than a gathering, and a model has many."""
    for counts in cluster("zero3").call(f"{CASES}:traced_readings"):
        assert counts == [2, 0]


@pytest.mark.parametrize("target", ["zero3", pytest.param("zero", marks=pytest.mark.seldom)])
def test_a_weight_is_assigned_through_its_value(cluster: Pool, target: str) -> None:
    expected = cluster.plain(f"{CASES}:assigned_by_value")
    for worker, result in enumerate(cluster(target).call(f"{CASES}:assigned_by_value")):
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize("target", ["zero3", "mesh"])
def test_a_layer_within_a_vectorized_map_is_refused(cluster: Pool, target: str) -> None:
    """A collective would run for each example; a stand-in of `deferred` would not be found."""
    for error in cluster(target).call(f"{CASES}:mapped_by_example"):
        assert " conflicts with tf.vectorized_map of a function that reads '" in error
        assert "Use tf.map_fn instead" in error


@pytest.mark.parametrize("target", ["zero", "zero3"])
def test_a_model_that_tensorflow_saves_is_refused(cluster: Pool, target: str) -> None:
    for error in cluster(target).call(f"{CASES}:saved_by_tensorflow"):
        assert error.startswith("ConfigError: tf.saved_model.save conflicts with zero=")
        assert "keras.models.load_model(path).export(directory)" in error


def test_state_that_one_process_reads_alone_is_named(cluster: Pool) -> None:
    for error in cluster("zero").call(f"{CASES}:read_on_one"):
        assert 'The workers are at different places of the program: worker 0 at "reading ' in error
