"""Horovod's part without Horovod: ranks, options, and what is said where it is missing."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
import types

import pytest

from tfdist.cli.build_horovod import build_horovod
from tfdist.cluster.environments import mpi
from tfdist.cluster.spec import Address, ClusterSpec, Task, rank_of
from tfdist.config import horovod_options
from tfdist.config.horovod_options import HorovodOptions
from tfdist.config.resolution import resolve
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.horovod.installer.compile import _CHANGES
from tfdist.strategies.horovod import library

ROOT = pathlib.Path(__file__).parents[2]


def test_ranks_on_hosts_of_different_sizes():
    hosts = ("a", "a", "b", "a", "b")
    cluster = ClusterSpec({"worker": tuple(Address(host, 1 + i) for i, host in enumerate(hosts))})
    found = [rank_of(cluster, Task("worker", i)) for i in range(5)]
    assert [(r.rank, r.size) for r in found] == [(i, 5) for i in range(5)]
    assert [(r.local_rank, r.local_size) for r in found] == [(0, 3), (1, 3), (0, 2), (2, 3), (1, 2)]
    assert [(r.cross_rank, r.cross_size) for r in found] == [(0, 2), (0, 2), (1, 2), (0, 1), (1, 2)]


def test_options_become_horovods_variables():
    config = StrategyConfig.of(
        strategy="horovod",
        fusion_mb=2,
        cycle_ms=0.5,
        hierarchical=True,
        autotune=True,
        timeline="out.json",
        stall_timeout=10,
    )
    assert horovod_options.variables(config.part(HorovodOptions)) == {
        "HOROVOD_FUSION_THRESHOLD": "2097152",
        "HOROVOD_CYCLE_TIME": "0.5",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_TIMELINE": "out.json",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10",
    }
    assert horovod_options.variables(HorovodOptions()) == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "multi_worker", "groups": 2}, "groups=2 conflicts"),
        ({"strategy": "horovod", "groups": 0}, "groups=0"),
        ({"strategy": "horovod", "cycle_ms": -1}, "cycle_ms=-1"),
        ({"strategy": "horovod", "devices": 2}, "devices=2 conflicts"),
        ({"strategy": "horovod", "timeline": "step.png"}, "timeline='step.png' asks for a picture"),
        ({"strategy": "horovod", "mode": "async"}, "mode='async' does not go"),
        (
            {"strategy": "horovod", "reduction": "adasum", "compression": "fp16", "processes": 2},
            "compression='fp16' conflicts",
        ),
    ],
)
def test_options_that_do_not_go(options, words):
    with pytest.raises(ConfigError, match=words.replace("(", "\\(")):
        StrategyConfig.of(**options)


def test_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = library.problem()
    assert found is not None
    assert "not installed" in found
    assert library.BUILD_COMMAND in found


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tensorflow": "2.9.1"}, "built for TensorFlow 2.9.1, and this is TensorFlow 2."),
        ({"pytorch": "2.0"}, "built without TensorFlow"),
    ],
)
def test_built_for_another(tmp_path, monkeypatch, metadata, words):
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    found = library.problem()
    assert found is not None
    assert words in found
    assert library.BUILD_COMMAND in found


def test_tfdist_works_without_horovod(tmp_path):
    """Everything is imported, with a horovod in the way that cannot be."""
    (tmp_path / "horovod.py").write_text("raise ImportError('no horovod here')")
    code = (
        "import tfdist, tfdist.horovod, tfdist.cli.main, tfdist.strategies.factory\n"
        "try:\n    tfdist.horovod.rank()\n"
        "except tfdist.ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert library.BUILD_COMMAND in done.stdout


def test_what_launchers_say():
    assert mpi.detect({}) is None
    assert mpi.detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}) == mpi.MpiRank(
        "Open MPI", 1, 4
    )
    assert mpi.detect({"PMI_RANK": "0", "PMI_SIZE": "2"}) == mpi.MpiRank("MPICH (PMI)", 0, 2)
    with pytest.raises(ConfigError, match="PMI_RANK='x'"):
        mpi.detect({"PMI_RANK": "x", "PMI_SIZE": "2"})
    assert resolve({}, environ={"HOROVOD_RANK": "0"}).config.strategy == "horovod"
    assert resolve({}, environ={"PMI_RANK": "0", "PMI_SIZE": "2"}).config.strategy == "multi_worker"
    assert resolve({}, environ={"PMI_RANK": "0", "PMI_SIZE": "1"}).config.strategy == "single"


def test_the_help_and_the_docs_tell_all_changes_of_the_source() -> None:
    words = {3: "Three", 4: "Four", 5: "Five"}
    assert f"{words[len(_CHANGES)]} places are changed" in " ".join(build_horovod.__doc__.split())
    docs = (ROOT / "docs" / "horovod.md").read_text()
    told = docs[docs.index("What is changed:") :].split("\n\n")[1]
    items = [item for item in told.split("\n- ") if item]
    assert len(items) == len(_CHANGES)
    for change, item in zip(_CHANGES, items, strict=True):
        file = change.path.rpartition("/")[2]
        assert (change.old if file == "CMakeLists.txt" else file) in item
        assert change.nccl is ("NCCL" in item)
