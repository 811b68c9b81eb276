"""A pipeline trains what the whole model trains; without a flush, what its delays say."""

from __future__ import annotations

import pytest

from tests.harness.tiers import seldom

CASES = "tests.cases.pipeline_cases"
DELAYED = "tests.cases.delay_cases"

SYNCHRONOUS = {
    "gpipe": {"stages": 3, "microbatches": 4, "schedule": "gpipe"},
    "1f1b": {"stages": 4, "microbatches": 8},
    "interleaved": {"stages": 2, "microbatches": 4, "schedule": "interleaved", "virtual": 2},
    "recomputed": {"stages": 3, "microbatches": 4, "recompute": True},
    "replicated": {"stages": 2, "replicas": 2, "microbatches": 4},
    "whole": {"stages": 1, "microbatches": 2},
}


def check_equal(found):
    assert found["weights"] < 1e-5
    first, second = found["history"]
    assert first.keys() == second.keys()
    for name in first:
        assert first[name] == pytest.approx(second[name], abs=1e-5), name
    first, second = found["evaluated"]
    for name in first:
        assert first[name] == pytest.approx(second[name], abs=1e-5), name
    assert found["updates"] == 50


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.core] * (how == "1f1b")) for how in SYNCHRONOUS]
)
def test_equals_the_whole_model(cluster, how):
    options = SYNCHRONOUS[how]
    (found,) = cluster("devices").call(f"{CASES}:equals_unsplit", name="dense", **options)
    check_equal(found)
    # Recomputed stages keep their inputs in the same number; the last one keeps its activations.
    forward_again = options["stages"] - 1 if "recompute" in options else 0
    assert found["again"].count(True) == forward_again
    assert found["live"] == found["counted"]
    assert len(found["devices"]) == options["stages"]
    assert len(found["boxes"]) == options["stages"] * options.get("replicas", 1)


@pytest.mark.parametrize("name", ["two_headed", "branched"])
def test_models_that_are_no_chain(cluster, name):
    (found,) = cluster("devices").call(
        f"{CASES}:equals_unsplit", name=name, stages=3, microbatches=4, optimizer="sgd"
    )
    check_equal(found)


@pytest.mark.parametrize(
    ("how", "optimizer"),
    [("replicated", "adam"), *seldom(("interleaved", "adam"), ("recomputed", "sgd"))],
)
def test_layers_that_several_stages_call_have_one_update(cluster, how, optimizer):
    """The tied embeddings of a language model: the first stage keeps them, the last reads them."""
    (found,) = cluster("devices").call(
        f"{CASES}:equals_unsplit", name="tied", optimizer=optimizer, **SYNCHRONOUS[how]
    )
    check_equal(found)
    assert found["borrowed"] == {"table/embeddings", "same/kernel", "same/bias"}


def test_stages_read_of_a_layer_what_they_need(cluster):
    """A gradient of looked-up rows stays one of rows, which Adam treats in another way."""
    (found,) = cluster("devices").call(
        f"{CASES}:equals_unsplit", name="untied", optimizer="by rows", **SYNCHRONOUS["gpipe"]
    )
    check_equal(found)
    assert found["borrowed"] == {"table/reverse_embeddings", "same/kernel", "same/bias"}


def test_weights_of_low_rank_in_frozen_layers_are_trained(cluster):
    (found,) = cluster("devices").call(
        f"{CASES}:equals_unsplit", name="adapted", optimizer="sgd", **SYNCHRONOUS["gpipe"]
    )
    check_equal(found)


def test_losses_over_masks_are_divided_by_what_the_batch_has(cluster):
    (found,) = cluster("devices").call(
        f"{CASES}:equals_over_masks", stages=2, replicas=2, microbatches=8
    )
    assert found["weights"] < 1e-5
    first, second = found["plain history"], found["piped history"]
    assert first.keys() == second.keys()
    for name in first:
        assert first[name] == pytest.approx(second[name], abs=1e-5), name


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "pipedream", "stages": 3, "microbatches": 1},
        {"schedule": "pipedream", "stages": 3, "microbatches": 1, "vertical_sync": True},
        {"schedule": "2bw", "stages": 3, "microbatches": 4},
    ],
    ids=["pipedream", "vertical", "2bw"],
)
def test_without_a_flush_equals_its_simulation(cluster, options):
    (found,) = cluster("devices").call(f"{DELAYED}:equals_delayed", **options)
    assert found["weights"] < 1e-5
    assert found["losses"][0] == pytest.approx(found["losses"][1], abs=1e-5)
    assert found["from_sync"] > 1e-4, "late gradients make a difference"
    assert found["updates"] == 18
    assert len(set(found["looked"])) == 3
    assert found["live"][-1] == 1
    assert found["live"][0] == 3


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_checkpoints_within_an_epoch_are_complete(cluster, tmp_path, schedule):
    (found,) = cluster("devices").call(
        f"{DELAYED}:equals_delayed",
        schedule=schedule,
        stages=3,
        microbatches={"pipedream": 1, "2bw": 4}[schedule],
        directory=str(tmp_path),
    )
    assert len(found["files"]) == 6
    assert max(found["files"].values()) < 1e-5, found["files"]
    # Training goes on from there, as the simulation with these flushes.
    assert found["weights"] < 1e-5
    assert found["losses"][0] == pytest.approx(found["losses"][1], abs=1e-5)


@pytest.mark.parametrize("drop", [False, True], ids=["statistics", "dropout"])
def test_statistics_and_random_numbers_are_a_microbatchs_own(cluster, drop):
    (found,) = cluster("devices").call(f"{CASES}:statistics", drop=drop)
    assert found["kept"] < 1e-5
    assert found["again"] < 1e-5
    assert found["moved"] > 1e-2


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 4), ("2bw", 2)])
def test_checkpoints_are_ordinary(cluster, tmp_path, schedule, microbatches):
    (found,) = cluster("devices").call(
        f"{CASES}:saved", directory=str(tmp_path), schedule=schedule, microbatches=microbatches
    )
    assert found["weights"] == 0
    assert found["updates"] == 8
    assert found["devices"] == ["CPU:0"]
    assert found["goes on"]


def test_a_batch_lasts_until_all_its_updates_are_handed_out(cluster):
    assert cluster("devices").call(f"{CASES}:handed_out_slowly") == [8]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("layers", ["4 stages are more than", "2 (dense0, head)", "at most 2 stages"]),
        ("batch", ["microbatches=3 does not divide the batch of 16", "15 or 18"]),
        ("device", ["no device 'cpu:4'", "CPU:3"]),
        ("shared", ["'same' is called 2 times", "'moving_mean'", "reads what stage 1 makes"]),
        ("stateful", ["'memory' is stateful"]),
        ("stateful, lazy", ["'memory' is stateful"]),
        ("assigned", ["normalized/dense/kernel", "SpectralNormalization"]),
        ("subclassed", ["Subclassed", "functional API"]),
        ("own step", ["OwnStep.train_step conflicts with strategy='pipeline'"]),
        ("looked up", ["both one by one and by unique ids", "two tables"]),
        ("masked", ["a mask of such a layer", "sample_weight"]),
        ("border", ["cuts='dance1'", "no layer 'dance1'", "dense1"]),
        ("order", ["cuts=", "not in the order of the model"]),
        ("borders", ["cuts='dense4'", "3 stages need 2 names", "has 1"]),
        ("divide", ["microbatches=4", "stages=3", "interleaved"]),
        ("clip", ["global_clipnorm=1.0", "schedule='2bw'"]),
        ("replicas", ["2 replicas of the pipeline conflict with schedule='pipedream'"]),
        ("share out", ["microbatches=3 cannot be shared out to 2 replicas"]),
        ("no number", ["a tensor of shape (None,)", "reduction='none'", "a mean or a sum"]),
        ("root", ["The metric 'root_mean_square' is not a mean or sum", "microbatches=1"]),
        ("largest", ["microbatches=2", "metric 'largest_output'", "(at Max)"]),
    ],
)
def test_mistakes_are_named(cluster, what, words):
    (found,) = cluster("devices").call(f"{CASES}:refused", what=what)
    assert found.startswith("ConfigError"), found
    for word in words:
        assert word in found


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "fails",
            ["too large an input", "in stage 1 on ", "forward step of microbatch 2, batch 1"],
        ),
        (
            "memory",
            [
                "Stage 1 on ",
                "CPU:1 ran out of memory in the forward step of microbatch 2, batch 1",
                "stage 1 0.0 MiB on ",
                "Give more microbatches",
                "--recompute",
            ],
        ),
    ],
    ids=["fails", "memory"],
)
def test_a_stage_that_fails_is_named_and_training_can_go_on(cluster, how, words):
    (found,) = cluster("devices").call(f"{CASES}:fails_in_the_middle", how=how)
    for word in words:
        assert word in found["told"], found["told"]
    assert found["kind"] == {"fails": "InvalidArgumentError", "memory": "OutOfMemoryError"}[how]
    assert found["unchanged"] == 0
    assert not found["under way"]
    assert found["loss"] == found["loss"]
