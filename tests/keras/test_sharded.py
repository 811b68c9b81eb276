"""Sharded checkpoints: each process writes its part; any number of processes reads them."""

from __future__ import annotations

import pathlib

import pytest

from tests.contract.conftest import assert_same
from tests.harness import Pool

CASES = "tests.cases.sharded_cases"


@pytest.mark.parametrize(("writer", "readers"), [("mesh_zero3", ("zero3", "mesh", "single"))])
def test_any_mesh_reads_what_another_has_written(
    cluster: Pool, tmp_path: pathlib.Path, writer: str, readers: tuple[str, ...]
) -> None:
    written = cluster(writer).call(f"{CASES}:saved", path=str(tmp_path))
    print(written[0]["before"], written[0]["after"])
    state = {name: written[0][name] for name in ("weights", "optimizer")}
    for reader in readers:
        for worker, found in enumerate(cluster(reader).call(f"{CASES}:loaded", path=str(tmp_path))):
            assert_same(state, found["model"], 0.0, f"the model on {reader} {worker}")
            assert_same(state, found["weights"], 0.0, f"the weights on {reader} {worker}")
