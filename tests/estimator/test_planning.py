"""Which jobs are those of Estimators, how they are planned, and what TF_CONFIG tells a task."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_run_servers import dry_run, mistake
from tfdist.cli.request import use_in
from tfdist.errors import ConfigError
from tfdist.estimator.task_config import TaskConfig, parse_task_config

PS = ("-s", "parameter_server")
CLUSTER = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1", "q:1"]}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (tmp_path / "train.py").write_text("import keras\nfrom tfdist import estimator\n")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import tfdist.estimator", 1),
        ("import os\nimport tfdist.estimator as e", 2),
        ("from tfdist import estimator, Mirrored", 1),
        ("from tfdist.estimator import RunConfig", 1),
        ("from tfdist.estimator.export import PredictOutput", 1),
        ("import tfdist as t\n\ndef f():\n    return t.estimator.Estimator", 4),
        ("import tfdist\ntfdist.strategy()", None),
        ("from tfdist import estimators", None),
        ("import estimator", None),
        ("from . import estimator", None),
        ("x.estimator", None),
        ("# tfdist.estimator", None),
        ("not python", None),
    ],
)
def test_the_use_of_estimators_is_seen(here: Path, text: str, line: int | None) -> None:
    (here / "job.py").write_text(text)
    assert use_in("job.py") == line


@pytest.mark.parametrize("by", ["script", "flag", "file"])
def test_every_task_runs_the_script(here: Path, by: str) -> None:
    words = ["-n", "3", "--ps", "2", "--evaluator", *PS]
    if by == "flag":
        (here / "train.py").write_text("import job")
        words.append("--every-task")
    if by == "file":
        (here / "s.toml").write_text('strategy = "parameter_server"\nprocesses = 3\nps = 2\n')
        words = ["-s", "s.toml", "--evaluator"]
    tasks = dry_run(*words)
    assert all(words[-1] == "train.py" and "tfdist.cli" not in " ".join(words) for words in tasks)
    (configs,) = [[word for word in words if word.startswith("TF_CONFIG=")] for words in tasks[:1]]
    cluster = json.loads(configs[0].partition("=")[2])["cluster"]
    counts = {kind: len(addresses) for kind, addresses in cluster.items()}
    assert counts == {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}
    assert len(tasks) == 6


def test_other_jobs_are_planned_as_before(here: Path) -> None:
    (here / "train.py").write_text("import keras")
    assert sum("tfdist.cli.server" in words for words in dry_run(*PS, "-n", "2")) == 3


@pytest.mark.parametrize("kind", ["chief", "worker", "ps", "evaluator"])
def test_one_task_of_a_cluster(here: Path, kind: str) -> None:
    config = json.dumps({"cluster": CLUSTER, "task": {"type": kind, "index": 0}})
    if kind == "evaluator":
        config = config.replace('"ps"', '"evaluator": ["e:1"], "ps"')
    (task,) = dry_run(*PS, TF_CONFIG=config)
    assert task[-1] == "train.py"
    assert "tfdist.cli" not in " ".join(task)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mode", "sync"], "--mode sync conflicts with line 2 of train.py uses tfdist.estimator"),
        (["--seed", "1"], "--seed 1 conflicts"),
        (["--hosts", "a:2"], "--hosts and --hostfile conflict"),
        (["--on", "slurm"], "--on slurm starts each task by"),
        (["--task-flags"], "--task-flags conflicts"),
    ],
)
def test_mistakes_are_explained(here: Path, words: list[str], said: str) -> None:
    assert re.search(said, mistake("run", *PS, *words, "train.py"))


def test_an_evaluator_needs_estimators(here: Path) -> None:
    (here / "train.py").write_text("import keras")
    assert "--evaluator starts a task that" in mistake("run", *PS, "--evaluator", "train.py")


def place(kind: str, index: int = 0, **cluster: list[str] | dict[str, str]) -> TaskConfig:
    task = {"type": kind, "index": index}
    return parse_task_config(json.dumps({"cluster": cluster or CLUSTER, "task": task}))


def test_places() -> None:
    chief, second, server = place("chief"), place("worker", 1), place("ps", 1)
    assert [each.is_chief for each in (chief, second, server)] == [True, False, False]
    assert [each.global_id for each in (chief, second, server)] == [0, 2, 4]
    assert [each.master for each in (chief, second)] == ["grpc://c:1", "grpc://b:1"]
    assert (chief.trainers, chief.count("ps")) == (3, 2)


def test_an_evaluator_is_apart() -> None:
    """It need not be listed."""
    found = place("evaluator")
    assert (found.trainers, found.count("ps"), found.master, found.is_chief) == (0, 0, "", False)
    assert found.global_id is None


def test_worker_0_is_chief_where_there_is_no_other() -> None:
    cluster = {"worker": ["a:1", "b:1"], "ps": ["p:1"]}
    assert place("worker", 0, **cluster).is_chief
    assert not place("worker", 1, **cluster).is_chief


def test_other_keys_of_tf_config() -> None:
    text = json.dumps({"model_dir": "/m", "service": {"x": 1}})
    assert parse_task_config(text) == TaskConfig(model_dir="/m", service={"x": 1})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"task": {"type": "worker", "index": 1}}, '"task".*is one of several.*no "cluster"'),
        ({"task": {"type": "chief", "index": 0}}, '"task".*"chief".*no "cluster"'),
        ({"task": {"type": "evaluator", "index": 0}, "cluster": {}}, 'no "cluster"'),
        ({"task": "worker"}, 'no "cluster"'),
        ({"model_dir": ""}, '"model_dir": "" in TF_CONFIG is no path'),
        ({"model_dir": 1}, '"model_dir": 1 in TF_CONFIG is no path'),
        ({"service": "x"}, '"service": "x" in TF_CONFIG is no object'),
        ({"session_master": "grpc://a:1"}, '"session_master": "grpc://a:1".*not supported'),
        ({"eval_session_master": "local"}, '"eval_session_master": "local".*not supported'),
        ([], "TF_CONFIG"),
        ("cluster", "TF_CONFIG"),
    ],
)
def test_mistakes_of_tf_config(content: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_task_config(json.dumps(content))


def test_a_text_that_is_no_json() -> None:
    with pytest.raises(ConfigError, match="TF_CONFIG has 1 mistake"):
        parse_task_config("{cluster")


@pytest.mark.parametrize("index", [0, "0"])
def test_worker_0_without_a_cluster_is_alone(index: Any) -> None:
    task = {"type": "worker", "index": index}
    assert parse_task_config(json.dumps({"task": task, "session_master": ""})) == TaskConfig()


def test_a_master_is_called_so() -> None:
    """The chief of TensorFlow 1. Its session's devices are those of a job of that name."""
    cluster = {"master": ["m:1"], "worker": ["a:1"], "ps": ["p:1"]}
    found = place("master", **cluster)
    assert (found.type, found.index, found.is_chief, found.master) == (
        "master",
        0,
        True,
        "grpc://m:1",
    )
    assert dict(found.cluster) == cluster
    ids = [place(kind, **cluster).global_id for kind in ("master", "worker", "ps")]
    assert ids == [0, 1, 2]
    assert (found.trainers, found.count("ps")) == (2, 1)
    assert not place("worker", **cluster).is_chief


@pytest.mark.parametrize("listed", [True, False])
def test_no_evaluator_beside_a_master(listed: bool) -> None:
    cluster = {"master": ["m:1"], "ps": ["p:1"], **({"evaluator": ["e:1"]} if listed else {})}
    with pytest.raises(ConfigError, match='a task "master", which evaluates by itself'):
        place("master" if listed else "evaluator", **cluster)


def test_a_cluster_of_one_task_runs_in_its_process() -> None:
    assert place("chief", chief=["c:1"]).master == ""


def test_a_listed_evaluator_is_not_numbered() -> None:
    """Workers divide the data by their numbers."""
    cluster = {"chief": ["c:1"], "evaluator": ["e:1"], "worker": ["a:1", "b:1"]}
    found = [place("worker", index, **cluster) for index in (0, 1)]
    assert [each.global_id for each in found] == [1, 2]
    assert [each.trainers for each in found] == [3, 3]
    assert all("evaluator" not in each.cluster and each.evaluated for each in found)


def test_an_estimator_refuses_a_part_of_a_cluster():
    with pytest.raises(ConfigError, match="but not worker 0, and an Estimator needs all tasks"):
        place("worker", 1, worker={"1": "b:1"}, ps=["p:1"])
