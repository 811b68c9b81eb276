"""`tf.train.Checkpoint` where each worker runs the same line."""

from __future__ import annotations

import os
import pathlib

import pytest

from tests.cases.checkpoint_cases import SAVES
from tests.harness import Pool
from tests.harness.tiers import seldom

CASES = "tests.cases.checkpoint_cases"
EXPECTED = [float(i + SAVES) for i in range(12)]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("multi_worker", "all"),
        *seldom(("multi_worker3", "all")),
        ("multi_worker", "each"),
        ("horovod", "chief"),
        ("mirrored", "all"),
    ],
)
def test_checkpoints_of_several_workers(
    cluster: Pool, tmp_path: pathlib.Path, name: str, where: str
) -> None:
    workers = cluster(name).call(f"{CASES}:saved", path=str(tmp_path), where=where, deadline=120)
    for folder in {worker["folder"] for worker in workers}:
        left = [f for f in os.listdir(folder) if not f.startswith(("ckpt-", "again", "checkpoint"))]
        assert left == []
        for file in ("again",) if where == "chief" else (None, "again"):
            found = cluster("plain").call(f"{CASES}:read", folder=folder, name=file)[0]
            assert found == EXPECTED
