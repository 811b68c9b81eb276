"""Sharded checkpoints: each process writes its part; any number of processes reads them."""

from __future__ import annotations

import pathlib

import pytest

from tests.contract.conftest import assert_same
from tests.harness import Pool
from tfdist.sharding.consolidation import consolidate

CASES = "tests.cases.sharded_cases"


def _consolidated(path: pathlib.Path) -> pathlib.Path:
    out = path / "whole"
    for name in ("model.keras", "w.weights.h5"):
        consolidate(str(path / name), str(out / name))
    return out


@pytest.mark.parametrize(
    ("writer", "policy", "readers"),
    [
        pytest.param("mesh_zero3", "float32", ("zero3", "mesh", "single", "zero")),
        # The same code on one axis, and with whole weights whose optimizer is divided.
        pytest.param("zero", "mixed_bfloat16", ("mesh_zero3",)),
        pytest.param("horovod_zero", "float32", ("mesh",), marks=pytest.mark.seldom),
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
