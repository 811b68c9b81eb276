"""`tfdist run` with parameter servers and for programs that every task runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_run import here as _here
from tests.cli.test_run import mistake, tfdist

here = _here

PS = ("--strategy", "parameter_server")
CLUSTER = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]}


def config_of(kind: str = "chief", index: int = 0, cluster: Any = None) -> str:
    task = {"type": kind, "index": index}
    return json.dumps({"cluster": cluster or CLUSTER, "task": task})


def dry_run(*words: str, **variables: str | None) -> list[list[str]]:
    """The words of each task's command, with its environment."""
    result = tfdist("run", "--dry-run", "--json", *words, "train.py", **variables)
    assert result.returncode == 0, result.stderr
    return [
        [*(f"{name}={value}" for name, value in each["environ"].items()), *each["command"]]
        for each in json.loads(result.stdout)["tasks"]
    ]


def config_in(words: list[str]) -> dict[str, Any]:
    (text,) = (w.partition("=")[2] for w in words if w.startswith("TFDIST_CONFIG="))
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_chief_runs_the_script_and_servers_serve_it(here: Path) -> None:
    tasks = dry_run(*PS, "-n", "3", "--ps", "2", "--mode", "stale", "--staleness", "4")
    assert [words[-1] for words in tasks] == ["train.py", *["tfdist.cli.server"] * 5]
    assert len({json.dumps(config_in(words)) for words in tasks}) == 1
    config = config_in(tasks[0])
    assert (config["processes"], config["ps"], config["staleness"]) == (3, 2, 4)


def test_servers_are_asked_for_by_their_number(here: Path) -> None:
    assert len(dry_run("-n", "2", "--ps", "1")) == 4


def test_the_strategy_file_that_is_shipped(here: Path) -> None:
    file = Path(__file__).parents[2] / "strategies/parameter_server.toml"
    tasks = dry_run("--strategy", str(file), "--mode", "sync")
    assert len(tasks) == 5


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (
            [],
            [
                "chief 0 at 127.0.0.1:.* (runs the script)",
                "worker 1 at 127.0.0.1:.* (trains)",
                "ps 1 at 127.0.0.1:.* (holds weights)",
                "2 (1 in each of 2 workers)",
                "on 2 parameter servers, large ones in up to 2 parts of at least 1 MiB",
            ],
        ),
        (
            ["--mode", "async", "--wire-dtype", "bfloat16", "--max-restarts", "3"],
            [
                "async (each worker's gradient is an update of its own)",
                "sent as bfloat16",
                "at most 3",
            ],
        ),
        (
            ["--mode", "stale", "--staleness", "4", "--on-stale", "drop"],
            [
                "stale (no gradient is applied after more than 4 other updates: a gradient staler "
                "than --staleness is discarded and counted)"
            ],
        ),
        (
            ["--backup-workers", "1", "--min-shard-bytes", "512"],
            ["sync (an update takes the first 1 of 2 gradients)", "at least 512 bytes"],
        ),
    ],
)
def test_the_table_says_who_does_what(here: Path, words: list[str], rows: list[str]) -> None:
    """With --env-only all tasks run the script, which here ends at once."""
    result = tfdist("run", *PS, "-n", "2", "--ps", "2", *words, "--env-only", "train.py")
    assert result.returncode == 0, result.stderr
    for row in rows:
        pattern = r"[\s│]+".join(re.escape(word).replace(r"\.\*", ".*") for word in row.split())
        assert re.search(pattern, result.stderr), (row, result.stderr)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*PS, "--ps", "0"], "--ps 0 is not a whole number of 1 or more.*hold the weights"),
        ([*PS, "--mode", "stale"], "--mode stale .* needs a bound"),
        ([*PS, "--mode", "stale", "--staleness", "-1"], "--staleness -1"),
        ([*PS, "-n", "2", "--backup-workers", "2"], "--backup-workers 2 leaves none of the 2"),
        ([*PS, "--mode", "local"], "--mode local does not go with --strategy parameter_server"),
        ([*PS, "--on-stale", "wiat"], "Unknown --on-stale 'wiat'"),
        (["-s", "multi_worker", "--ps", "2"], "--ps 2 conflicts with --strategy multi_worker"),
        (["--max-restarts", "-1"], "Invalid value for '--max-restarts'"),
        (["--task-flags"], "--task-flags gives .* Add --every-task"),
        (["--every-task", "-s", "single"], "--strategy single conflicts with --every-task"),
        (["--every-task", "--mode", "async"], "--mode async conflicts with --every-task"),
        (["--every-task", "--start-timeout", "9"], "--start-timeout 9.0 conflicts with --every"),
        (["--every-task", "--ps", "0"], "--ps 0 conflicts with --every-task"),
    ],
)
def test_mistakes_are_explained(here: Path, words: list[str], said: str) -> None:
    assert re.search(said, mistake("run", *words, "train.py"))


def test_gpus_are_for_workers(here: Path) -> None:
    tasks = dry_run(*PS, "-n", "2", CUDA_VISIBLE_DEVICES="4,5,6")
    given = [w for words in tasks for w in words if w.startswith("CUDA_VISIBLE_DEVICES=")]
    assert [text.partition("=")[2] for text in given] == ["", "4", "5", ""]


@pytest.mark.parametrize("words", [(), PS, (*PS, "-n", "2", "--ps", "1")])
def test_tf_config_names_the_task(here: Path, words: tuple[str, ...]) -> None:
    """All come to one configuration, whatever part of it they were given."""
    for kind, index in (("chief", 0), ("worker", 1), ("ps", 0)):
        config = config_of(kind, index)
        (task,) = dry_run(*words, TF_CONFIG=config)
        assert task[-1] == ("train.py" if kind == "chief" else "tfdist.cli.server")
        assert config_in(task)["strategy"] == "parameter_server"
        assert (config_in(task)["processes"], config_in(task)["ps"]) == (2, 1)


def test_options_are_checked_against_the_cluster(here: Path) -> None:
    words = (*PS, "--backup-workers", "1")
    (task,) = dry_run(*words, TF_CONFIG=config_of())
    assert config_in(task)["backup_workers"] == 1


@pytest.mark.parametrize(
    ("config", "words", "said"),
    [
        (config_of(), ["-n", "3"], "-n 3 conflicts with TF_CONFIG, .* has 2 workers"),
        (config_of(), ["--ps", "3"], "--ps 3 conflicts with TF_CONFIG, .* has 1 parameter server."),
        (
            config_of(cluster={"chief": ["c:1"], "worker": ["a:1"], "ps": []}),
            [],
            r"cluster.ps: \[\] lists no task",
        ),
        (config_of(cluster={"chief": ["c:1"], "worker": ["a:1"]}), [*PS], "lists no ps"),
        (
            config_of("worker", cluster={"worker": ["a:1"], "ps": ["p:1"]}),
            [],
            "lists no chief.*--every-task",
        ),
        (config_of("evaluator"), [*PS], "evaluator 0 has nothing to do"),
        (config_of("chief", 1), [*PS], "1 is out of range"),
        (
            config_of(cluster={**CLUSTER, "chief": ["c:1", "d:1"]}),
            [],
            "There are 2 chiefs",
        ),
        (config_of(), ["--every-task", "-n", "5"], "-n 5 conflicts with TF_CONFIG"),
        (config_of(), ["--every-task", "--task-flags"], "--task-flags conflicts .* type chief"),
    ],
)
def test_a_tf_config_that_does_not_fit(
    here: Path, config: str, words: list[str], said: str
) -> None:
    assert re.search(said, mistake("run", *words, "train.py", TF_CONFIG=config))


def test_every_task_runs_the_script(here: Path) -> None:
    tasks = dry_run("--every-task", "--task-flags", "-n", "2", "--ps", "2")
    assert len(tasks) == 4
    places = [words[words.index("train.py") + 1 :] for words in tasks]
    assert [place[:2] for place in places] == [
        ["--job_name=worker", "--task_index=0"],
        ["--job_name=worker", "--task_index=1"],
        ["--job_name=ps", "--task_index=0"],
        ["--job_name=ps", "--task_index=1"],
    ]
    assert len({tuple(place[2:]) for place in places}) == 1
    assert [len(flag.split(",")) for flag in places[0][2:]] == [2, 2]


def test_one_task_of_a_between_graph_program(here: Path) -> None:
    config = config_of("ps", cluster={"worker": ["a:1"], "ps": ["p:1"]})
    (task,) = dry_run("--every-task", "--task-flags", TF_CONFIG=config)
    assert task[task.index("train.py") + 1 :] == [
        *("--job_name=ps", "--task_index=0", "--ps_hosts=p:1", "--worker_hosts=a:1")
    ]
