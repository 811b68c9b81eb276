"""Sharded checkpoints: each process writes its part; any number of processes reads them."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from tests.contract.conftest import assert_same
from tests.harness import CallError, Pool
from tests.harness.tiers import seldom
from tfdist.sharding.checkpoint import Checkpoint
from tfdist.sharding.consolidation import consolidate

CASES = "tests.cases.sharded_cases"


def _consolidated(path: pathlib.Path) -> pathlib.Path:
    out = path / "whole"
    for name in ("model.keras", "w.weights.h5"):
        consolidate(str(path / name), str(out / name))
    return out


def _shares(path: pathlib.Path) -> list[float]:
    """The parts of all elements that each process has written."""
    with Checkpoint(str(path)) as saved:
        slices = [each for entry in saved.index.variables.values() for each in entry.slices]
        total = sum(each.region.size for each in slices)
        files = saved.index.files
        return [
            sum(each.region.size for each in slices if each.file == file) / total for file in files
        ]


@pytest.mark.parametrize(
    ("writer", "policy", "readers"),
    [
        *seldom(("mesh_zero3", "float32", ("zero3", "single"))),
        # The same code on one axis, and with whole weights whose optimizer is divided.
        pytest.param("zero", "mixed_bfloat16", ("mesh",)),
        *seldom(("horovod_zero", "float32", ("mesh",))),
    ],
)
def test_any_mesh_goes_on_from_what_another_has_written(
    cluster: Pool, tmp_path: pathlib.Path, writer: str, policy: str, readers: tuple[str, ...]
) -> None:
    """The state is equal to the bit, and training goes on as in one process that had not stopped.

    Plain Keras reads the consolidated files.
    """
    options = {"path": str(tmp_path), "policy": policy, "deadline": 300}
    written = cluster(writer).call(f"{CASES}:saved", **options)[0]
    state = {name: written[name] for name in ("weights", "optimizer")}
    assert len(written["before"]) == len(written["after"]) == written["processes"] + 2
    assert not {*written["before"]} & {*written["after"]} - {"index.json", "config.json"}
    for name in ("model.keras", "w.weights.h5"):
        shares = _shares(tmp_path / name)
        assert len(shares) == written["processes"]
        assert max(shares) < 1.3 / len(shares)
    expected = cluster.plain(f"{CASES}:uninterrupted", policy=policy)
    places = {"plain": str(_consolidated(tmp_path)), **dict.fromkeys(readers, str(tmp_path))}
    for reader, path in places.items():
        found = cluster(reader).call(f"{CASES}:loaded", path=path, policy=policy, deadline=300)
        for worker, result in enumerate(found):
            where = f"{reader} {worker}"
            assert_same(state, result["model"], 0.0, f"the model on {where}")
            assert_same(state, result["weights"], 0.0, f"the weights on {where}")
            tolerance = 1e-5 if policy == "float32" else 3e-2
            assert_same(expected, result["on"], tolerance, f"training on {where}")


@pytest.mark.seldom  # tests/jobs/test_sharded_files.py: after a kill.
def test_training_goes_on_from_a_backup_on_half_the_processes(
    cluster: Pool, tmp_path: pathlib.Path
) -> None:
    """The same weights, optimizer, metrics and logs as one process that was not interrupted."""
    case, path = f"{CASES}:backed_up", tmp_path / "backup"
    expected = cluster.plain(case, path=str(tmp_path / "plain"), interrupt=False)
    written = cluster("mesh_zero3").call(case, path=str(path), interrupt=True, deadline=300)
    assert len(written[0]["files"]) == 5
    shutil.copytree(path, tmp_path / "older")
    part = next((tmp_path / "older" / "latest.weights.h5").glob("part-00002.*"))
    part.unlink()  # The backup before the last takes its place.
    for reader, place in (("zero3", path), ("single", tmp_path / "older")):
        found = cluster(reader).call(case, path=str(place), interrupt=False, deadline=300)
        for worker, result in enumerate(found):
            epochs = len(result["history"]["loss"])
            history = {name: values[-epochs:] for name, values in expected["history"].items()}
            assert epochs == (2 if reader == "zero3" else 3)
            assert_same({**expected, "history": history}, result, 1e-5, f"{reader} {worker}")


@pytest.mark.parametrize(
    ("worker", "place"),
    [
        (1, "put"),
        # All parts are written, and the index is not: to a reader the same.
        *seldom((0, "_replace")),
    ],
)
def test_a_kill_in_the_middle_of_a_save_loses_nothing(
    cluster: Pool, tmp_path: pathlib.Path, worker: int, place: str
) -> None:
    with pytest.raises(CallError):
        cluster("zero3").call(f"{CASES}:dying", path=str(tmp_path), worker=worker, place=place)
    assert len(list((tmp_path / "model.keras").glob("part-*"))) > 2
    found, expected = cluster("single").call(f"{CASES}:states", path=str(tmp_path))[0]
    assert_same(expected, found, 0.0, "the save before the kill")


def test_a_full_disk_of_one_process_is_an_error_on_all(
    cluster: Pool, tmp_path: pathlib.Path
) -> None:
    for result in cluster("zero3").call(f"{CASES}:full_disk", path=str(tmp_path)):
        assert result["error"].startswith(f"SaveError: Cannot save to '{tmp_path}/model.keras'")
        assert "File too large. What was there before is unchanged" in result["error"]
        assert result["before"] == result["after"]


@pytest.mark.parametrize("target", ["zero", *seldom("mesh_zero3")])
def test_a_checkpoint_of_tensorflow_has_whole_weights(
    cluster: Pool, tmp_path: pathlib.Path, target: str
) -> None:
    for result in cluster(target).call(f"{CASES}:checkpointed", path=str(tmp_path), deadline=300):
        assert_same(result["written"], result["read"], 0.0, target)
        assert any("shape=" in text and "value=" not in text for text in result["texts"])


def test_weights_that_the_chief_reads_in_the_middle_of_an_epoch_are_named(cluster: Pool) -> None:
    """No wait without an end: the other process has come to the end of its batch."""
    with pytest.raises(
        CallError, match=r"different places of the program: worker 0 at .*reading '"
    ):
        cluster("zero3").call(f"{CASES}:read_on_one")
