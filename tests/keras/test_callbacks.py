"""Keras's callbacks under a strategy: all act alike, one writes, and training can be resumed."""

from __future__ import annotations

import csv
import io
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from tests.contract.conftest import assert_same
from tests.harness import CallError, Pool
from tests.harness.tiers import seldom

CASES = "tests.cases.callback_cases"

#: Batches in an epoch of the cases' data.
STEPS = 10

#: On one process, which the chief of servers is, too, a callback writes as on stock Keras.
WRITERS = [
    "multi_worker",
    *seldom("mirrored", "parameter_server"),
]

EVERYTHING: dict[str, Any] = {
    "histogram_freq": 1,
    "write_images": True,
    "write_steps_per_second": True,
    "update_freq": 2,
    "profile_batch": (2, 3),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        # What acts on one kind of strategy acts on the other by the same lines.
        *seldom(("mirrored", "early_stopping")),
        *seldom(("mirrored", "ema_epoch")),
        ("multi_worker", "early_stopping"),
        ("multi_worker", "nan"),
        *seldom(("mesh", "ema"), ("zero3", "ema_epoch"), ("multi_worker", "plateau")),
        *seldom(("multi_worker", "schedule")),
        *seldom(("multi_worker", "ema")),
        *seldom(("multi_worker", "ema_epoch")),
    ],
)
def test_callbacks_act_as_on_one_device(cluster: Pool, name: str, kind: str) -> None:
    expected = cluster.plain(f"{CASES}:acting", kind=kind)
    for worker, result in enumerate(cluster(name).call(f"{CASES}:acting", kind=kind)):
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize("readers", ["none", "chief", "loop", *seldom("single")])
@pytest.mark.parametrize("name", ["multi_worker", *seldom("horovod")])
def test_logs_of_batches_are_exchanged_if_they_are_read(
    cluster: Pool, name: str, readers: str
) -> None:
    expected = cluster.plain(f"{CASES}:batch_logs", readers=readers)
    for worker, result in enumerate(cluster(name).call(f"{CASES}:batch_logs", readers=readers)):
        if readers != "loop":
            # Those of gradients alone; all are in one exchange.
            assert set(result.pop("exchanges")) == {1}
            expected.pop("exchanges", None)
        if readers == "chief" and worker:
            assert result["seen"] == []
            result["seen"] = expected["seen"]
        assert_same(expected, result, 1e-5, f"worker {worker}")


@pytest.mark.parametrize("name", ["plain", *WRITERS])
def test_checkpoints(cluster: Pool, tmp_path: pathlib.Path, name: str) -> None:
    workers = cluster(name).call(f"{CASES}:checkpoints", path=str(tmp_path))
    chief, others = workers[0], workers[1:]
    assert len(chief["files"]) == 4
    assert not [file for file in chief["files"] if file.startswith(".")]
    assert chief["best"] == pytest.approx(min(chief["history"]["val_loss"]), rel=1e-5)
    for worker in others:
        assert worker["moved"] == 0
        assert_same({**chief, "moved": 0}, worker, 0.0, "worker")


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.seldom  # Checkpoints, above, are written by the same rule.
def test_csv_logger(cluster: Pool, tmp_path: pathlib.Path, name: str) -> None:
    expected = cluster.plain(f"{CASES}:log_csv", path=str(tmp_path / "plain"))
    for text in cluster(name).call(f"{CASES}:log_csv", path=str(tmp_path / name)):
        rows, wanted = (list(csv.DictReader(io.StringIO(each))) for each in (text, expected))
        assert [row["epoch"] for row in rows] == ["0", "1", "0"]
        for row, want in zip(rows, wanted, strict=True):
            assert {k: float(v) for k, v in row.items()} == pytest.approx(
                {k: float(v) for k, v in want.items()}, rel=1e-4
            )


@pytest.mark.parametrize("name", WRITERS)
def test_tensorboard_writes_once(cluster: Pool, tmp_path: pathlib.Path, name: str) -> None:
    _check_board(cluster, name, tmp_path, EVERYTHING)


def test_tensorboard_with_its_defaults(cluster: Pool, tmp_path: pathlib.Path) -> None:
    _check_board(cluster, "multi_worker", tmp_path, {})


def _check_board(cluster: Pool, name: str, path: pathlib.Path, options: dict[str, Any]) -> None:
    pytest.importorskip("tensorboard")
    plain, own = str(path / "plain"), str(path / name)
    expected = cluster("plain").call(f"{CASES}:board", path=plain, options=options)[0]
    for worker in cluster(name).call(f"{CASES}:board", path=own, options=options):
        assert worker["files"] == ["logs/train", "logs/validation"]
        assert worker["tags"] == expected["tags"]
        assert worker["profiles"] == expected["profiles"]
        assert_same(expected["history"], worker["history"], 1e-5, name)


def test_one_worker_stops_all(cluster: Pool) -> None:
    assert cluster("multi_worker").call(f"{CASES}:stop_on_one") == [2, 2]


@pytest.mark.parametrize(
    ("name", "how", "steps"),
    [
        ("multi_worker", "one", 4),
        ("multi_worker", "all", 4),
        ("multi_worker", "only_there", 4),
        ("multi_worker", "outside", STEPS),
        # The workers tell each other by the same lines, over other connections.
        ("horovod", "one", 4),
        *seldom(("horovod", "all", 4)),
        *seldom(("horovod", "only_there", 4)),
        *seldom(("horovod", "outside", STEPS)),
    ],
)
def test_workers_stop_together_within_an_epoch(
    cluster: Pool, name: str, how: str, steps: int
) -> None:
    first, second = cluster(name).call(f"{CASES}:stop_in_epoch", how=how)
    assert first["steps"] == steps
    assert len(first["history"]["loss"]) == 1
    assert_same(first, second, 1e-6, "the other worker")


@pytest.mark.parametrize("how", ["one", "all", "only_there", "outside"])
@pytest.mark.parametrize("name", ["multi_worker", pytest.param("horovod", marks=pytest.mark.slow)])
def test_workers_leave_an_evaluation_and_a_prediction_together(
    cluster: Pool, name: str, how: str
) -> None:
    first, second = cluster(name).call(f"{CASES}:stop_loops", how=how)
    assert [len(rows) for rows in first["rows"]] == [77 if how == "outside" else 24, 77]
    assert_same(first, second, 1e-6, "the other worker")


@pytest.mark.parametrize("worker", [0, 1])
def test_an_error_on_one_worker_reaches_all(
    cluster: Pool, tmp_path: pathlib.Path, worker: int
) -> None:
    errors = cluster("multi_worker").call(f"{CASES}:fail_on_one", path=str(tmp_path), worker=worker)
    assert errors == ["FileNotFoundError: no file after epoch 0"] * 2


@pytest.mark.parametrize(
    ("name", "options", "done"),
    [
        # (file, n): killed with the n-th backup written but not in place. ("batch", n): in a batch.
        pytest.param(
            *("multi_worker", {"die": ("latest.weights.h5", 2)}, STEPS), marks=pytest.mark.core
        ),
        *seldom(("multi_worker", {"die": ("training_metadata.json", 2)}, 2 * STEPS)),
        ("multi_worker", {"die": ("batch", 17), "save_freq": 3}, 15),
        *seldom(("mirrored", {"die": ("batch", 9), "save_freq": 4, "model": "lazy"}, 8)),
    ],
)
def test_resumes_after_a_kill(
    cluster: Pool, tmp_path: pathlib.Path, name: str, options: dict[str, Any], done: int
) -> None:
    model, freq = options.get("model", "dense"), options.get("save_freq", "epoch")
    kept = {"path": str(tmp_path), "model": model, "save_freq": freq}
    expected = cluster.results(name, f"{CASES}:back_up", path=None, model=model)[0]
    with pytest.raises(CallError):
        cluster(name).call(f"{CASES}:back_up", die=options["die"], **kept)
    for result in cluster(name).call(f"{CASES}:back_up", **kept):
        assert result["steps"] == 3 * STEPS - done
        assert result["iterations"] == expected["iterations"] == 4 * STEPS
        assert result["left"] == []
        assert_same(expected["weights"], result["weights"], 1e-6, "the resumed training")
        assert_same(expected["again"], result["again"], 1e-6, "training after it")
        epochs = len(result["history"]["loss"])
        last = {key: values[-epochs:] for key, values in expected["history"].items()}
        assert_same(last, result["history"], 1e-5, "the resumed history")


def test_falls_back_to_the_backup_before(cluster: Pool, tmp_path: pathlib.Path) -> None:
    path, die = str(tmp_path), ("batch", 25)
    with pytest.raises(CallError):
        cluster("multi_worker").call(f"{CASES}:back_up", path=path, double=True, die=die)
    assert len(os.listdir(tmp_path / "backup")) == 4
    cluster("plain").call(f"{CASES}:damage_backup", path=path)
    results = cluster("multi_worker").call(f"{CASES}:back_up", path=path, double=True)
    assert [result["steps"] for result in results] == [2 * STEPS] * 2
    assert np.all(results[0]["iterations"] == 4 * STEPS)
