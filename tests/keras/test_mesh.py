"""A mesh with a model axis: layers in parts train what one process trains."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tests.contract.conftest import assert_same
from tests.harness import Pool
from tests.harness.tiers import seldom

CASES = "tests.cases.mesh_cases"
NETWORKS = ("network", "transformer", "groups", "recurrent", "subclassed")


def _marks(target: str, network: str) -> list[pytest.MarkDecorator]:
    return [] if (target, network) == ("mesh", "transformer") else [pytest.mark.seldom]


@pytest.mark.parametrize(
    ("target", "network"),
    [
        pytest.param(target, network, marks=_marks(target, network))
        for target in ("mesh", "mesh_zero1", "mesh_zero3", "horovod_mesh")
        for network in NETWORKS
    ],
)
def test_layers_in_parts_train_what_whole_ones_train(
    cluster: Pool, target: str, network: str
) -> None:
    """Two replicas draw other dropout masks than one process: those of two whole models."""
    if target == "mesh":
        expected = cluster.plain(f"{CASES}:trained", network=network)
    else:
        expected = cluster("multi_worker").call(f"{CASES}:trained", network=network)[0]
    for worker, result in enumerate(cluster(target).call(f"{CASES}:trained", network=network)):
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize(
    "target",
    ["mesh", *seldom("mesh_zero1", "mesh_zero3")],
)
def test_a_process_keeps_and_updates_parts(cluster: Pool, target: str) -> None:
    """Of each kind of layer: an embedding, heads, columns, rows, and a norm, which is whole."""
    expected = {"mesh": (2, 2), "mesh_zero1": (4, 2), "mesh_zero3": (4, 4)}[target]
    paths = ("embedding/embeddings", "attention/query/kernel", "attention_output/kernel")
    for result in cluster(target).call(f"{CASES}:held"):
        parted = [each for path, each in result.items() if path.endswith((*paths, "/kernel"))]
        assert len(parted) > 8
        for shard, kept, whole in parted:
            assert (whole / shard, whole / kept) == expected
        norms = [kept for path, (_, kept, _) in result.items() if "normalization" in path]
        assert norms == [8 // (2 if target == "mesh_zero3" else 1)] * len(norms)


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        ("eager", {}, "mesh='model=2' conflicts with a step that runs eagerly"),
        ("loop", {}, "mesh='model=2' conflicts with a training loop written by hand"),
        ("lamb", {}, "mesh='model=2' conflicts with the optimizer Lamb"),
        ("outputs", {}, "mesh='model=2' conflicts with a gradient of 'Tanh"),
        ("policy", {}, "mesh='model=2' conflicts with the auto-shard policy OFF"),
        (
            "rule",
            {"layouts": "odd/kernel=- model"},
            "divides dimension 1 of the weight 'sequential/odd/kernel' of shape (8, 15), 15, over "
            "2 processes, which do not divide it. Instead divide dimension 0, give the layer a",
        ),
        ("rule", {"layouts": "last/bias=- model"}, "has 2 dimensions, and the weight"),
        ("rule", {"layouts": "even=- model"}, "The layout 'even=- model' matches none of the"),
        (
            "rule",
            {"layouts": "odd/kernel=model -;kernel=model -"},
            "layouts has two rules for the weight 'sequential/odd/kernel': 'odd/kernel=model -'",
        ),
    ],
)
def test_models_that_cannot_be_divided_as_asked_are_refused(
    cluster: Pool, kind: str, options: dict[str, str], error: str
) -> None:
    for message in cluster("mesh").call(f"{CASES}:made_of", kind=kind, **options):
        assert error in message


@pytest.mark.parametrize("target", ["mesh", *seldom("mesh_zero3")])
def test_files_are_whole(cluster: Pool, target: str, tmp_path: pathlib.Path) -> None:
    """Plain Keras reads the same bits; training goes on from them as if it had not stopped."""
    path = str(tmp_path / "model.keras")
    results = cluster(target).call(f"{CASES}:saved", path=path)
    alone = cluster.plain(f"{CASES}:loaded_by_one_process", path=path)
    for result in results:
        for before, after, own in zip(result["before"], result["after"], alone, strict=True):
            np.testing.assert_array_equal(before, after)
            np.testing.assert_array_equal(before, own)
        assert_same(results[0]["on"], result["on"], 1e-6, target)


def test_pairs_of_layers_need_one_sum(cluster: Pool) -> None:
    """The heads of an attention and the columns of a dense layer are never gathered."""
    for result in cluster("mesh").call(f"{CASES}:collectives"):
        assert result == {"Gather": 0, "Reduce": 2}


def test_cross_entropies_of_logits_in_parts_are_those_of_whole_ones(cluster: Pool) -> None:
    """With masks, weights of examples, caps and casts between the logits and the loss."""
    expected = cluster.plain(f"{CASES}:entropies")
    for worker, result in enumerate(cluster("mesh").call(f"{CASES}:entropies")):
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize("read", [None, "warm"])
def test_only_logits_that_are_read_are_gathered(cluster: Pool, read: str | None) -> None:
    for result in cluster("mesh").call(f"{CASES}:gathers_of_logits", read=read):
        assert result == {"of logits": 0 if read is None else 1, "others": 10}


@pytest.mark.parametrize("weights_by_batch", [False, True])
def test_the_distribution_api_of_keras(cluster: Pool, weights_by_batch: bool) -> None:
    """Of Keras's documentation, unchanged; the batch axis may divide weights too."""
    case = f"{CASES}:by_keras"
    expected = dict(cluster.plain(case))
    parts = [2, 1, 4 if weights_by_batch else 2, 2, 4 if weights_by_batch else 2, 2]
    kept = [size // part for size, part in zip(expected.pop("kept"), parts, strict=True)]
    for worker, result in enumerate(
        cluster("laid_out").call(case, weights_by_batch=weights_by_batch)
    ):
        assert result.pop("kept") == kept
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("single", "one device"),
        ("mirrored", "one device"),
        ("mirrored", "data"),
        ("mirrored", "own data"),
        *seldom(("single", "data"), ("parameter_server", "one device"), ("multi_worker", "data")),
    ],
)
def test_a_distribution_that_divides_no_weight(cluster: Pool, target: str, kind: str) -> None:
    """A program that is tried on one device, and data parallel training, need no mesh."""
    case = f"{CASES}:by_keras_without_parts"
    expected = cluster.plain(case, kind=kind)
    for worker, result in enumerate(cluster(target).call(case, kind=kind)):
        assert_same(expected, result, 1e-5, f"worker {worker}")


def test_rules_of_a_layout_map_are_those_of_keras(cluster: Pool) -> None:
    """An exact path before patterns, also later ones; without a rule a weight is whole."""
    for found in cluster("mesh").call(f"{CASES}:kept_by_keras"):
        assert (found.pop("count"), found.pop("same")) == (0, 3.0)
        assert found == {
            "dense_a": (32, 256),
            "dense_b": (64, 128),
            "late": (32, 256),
            "other": (64, 256),
            "unruled": (64, 256),
            "dense_odd": (32, 255),
            "dense_again": (64, 128),
        }


def test_processes_that_are_one_replica_draw_the_same_numbers(cluster: Pool) -> None:
    first, second = cluster("mesh").call(f"{CASES}:noisy")
    assert_same(first, second, 0.0, "of the two members")


@pytest.mark.parametrize(
    ("target", "sizes", "options", "error"),
    [
        ("mesh", {"batch": 2, "model": 1}, {}, "conflicts with mesh='model=2', which the job has"),
        ("mesh", {"batch": 2, "model": 2}, {}, "conflicts with a job of 2 processes"),
        ("mesh", {"batch": 1, "a": 2, "b": 2}, {}, "has 2 axes beside 'batch'"),
        ("mesh", {"batch": 1, "model": 2}, {"auto_shard": False}, "auto_shard_dataset=False"),
        ("single", {"batch": 1, "model": 2}, {}, "conflicts with strategy='single'. Choose"),
    ],
)
def test_distributions_that_cannot_be_followed_are_refused(
    cluster: Pool, target: str, sizes: dict[str, int], options: dict[str, bool], error: str
) -> None:
    for message in cluster(target).call(f"{CASES}:refused_by_keras", sizes=sizes, **options):
        assert message.startswith("ConfigError: ")
        assert error in message
