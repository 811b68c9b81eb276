"""Models saved under a strategy: by one process, completely or not at all; loaded everywhere."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import socket
import subprocess
import time
from typing import Any

import pytest

from tests.contract.conftest import assert_same
from tests.harness import KINDS, CallError, Pool
from tests.harness.tiers import seldom

CASES = "tests.cases.saving_cases"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("multi_worker", marks=pytest.mark.core),
        "parameter_server",
        # The first is one process; two workers show what one writes and the others do not; the
        # optimizer's state is divided under `zero3` too.
        *seldom("mirrored", "multi_worker3", "zero", "zero3"),
    ],
)
def test_every_format(cluster: Pool, tmp_path: pathlib.Path, name: str) -> None:
    path = str(tmp_path)
    workers = cluster(name).call(f"{CASES}:write_all", path=path)
    chief = workers[0]
    exports = name != "zero3"
    expected_files = {"model.keras", "model.h5", "directory", *(["exported"] if exports else [])}
    assert expected_files <= set(chief["moved"])
    assert [worker["moved"] for worker in workers[1:]] == [[]] * (len(workers) - 1)
    assert not [file for file in os.listdir(tmp_path) if file.endswith(".partial")]
    readers = {
        "plain": cluster("plain").call(f"{CASES}:read_all", path=path),
        name: cluster(name).call(f"{CASES}:read_all", path=path),
    }
    for reader, found in readers.items():
        for worker, states in enumerate(found):
            for file, state in states.items():
                expected = {key: chief["state"][key] for key in state}
                assert_same(expected, state, 0.0, f"{file}, read by {reader} {worker},")
    if exports:
        for reader in ("plain", name):
            for served in cluster(reader).call(f"{CASES}:serve", path=path):
                for each in served:
                    assert_same(chief["predicted"], each, 1e-6, f"the exported model on {reader}")


@pytest.mark.parametrize(
    "name", ["multi_worker", "zero3", *seldom("mirrored", "parameter_server", "zero")]
)
def test_training_goes_on_from_a_file(cluster: Pool, tmp_path: pathlib.Path, name: str) -> None:
    expected = cluster(name).call(f"{CASES}:uninterrupted")[0]
    for result in cluster(name).call(f"{CASES}:continued", path=str(tmp_path)):
        assert_same(expected, result, 1e-6, name)


@pytest.mark.parametrize("name", KINDS)
def test_a_metric_of_the_model_itself(cluster: Pool, tmp_path: pathlib.Path, name: str) -> None:
    workers = cluster(name).call(f"{CASES}:own_metric", path=str(tmp_path))
    for worker in workers:
        assert worker["result"] > 0.5
        assert worker["result"] == pytest.approx(workers[0]["result"], rel=1e-6)
        assert worker["loaded"] == pytest.approx(worker["result"], rel=1e-6)
        assert "SaveError" in worker["failure"]["kinds"]


@pytest.mark.parametrize("name", KINDS)
def test_a_full_disk_loses_nothing(cluster: Pool, tmp_path: pathlib.Path, name: str) -> None:
    _check_full_disk(cluster(name).call(f"{CASES}:full_disk", path=str(tmp_path)), tmp_path)


def test_a_full_file_system_loses_nothing(cluster: Pool, tmp_path: pathlib.Path) -> None:
    mounted = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mounted, capture_output=True).returncode != 0:
        pytest.skip("Mounting a small file system needs root.")
    try:
        workers = cluster("multi_worker").call(
            f"{CASES}:full_disk", path=str(tmp_path), limited=False
        )
        _check_full_disk(workers, tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def _check_full_disk(workers: list[dict[str, Any]], path: pathlib.Path) -> None:
    for worker in workers:
        assert worker["files"] == ["full", "full.h5", "full.keras", "full.weights.h5"]
        for name, failure in worker["failures"].items():
            assert failure, f"Saving {name} did not fail."
            assert "SaveError" in failure["kinds"]
            assert "OSError" in failure["kinds"]
            assert f"Cannot save to '{path}/{name}'" in failure["message"]
            assert re.search("No space left|File too large", failure["message"])
            assert not re.search(r"\.partial|0x", failure["message"])
            assert failure["seconds"] < 20
    assert len({str([f["message"] for f in w["failures"].values()]) for w in workers}) == 1


@pytest.mark.parametrize("name", ["plain", "single", "multi_worker"])
def test_bad_places(cluster: Pool, tmp_path: pathlib.Path, name: str) -> None:
    for worker in cluster(name).call(f"{CASES}:bad_places", path=str(tmp_path)):
        assert "OSError" in worker["directory"]["kinds"]
        assert "is a directory" in worker["directory"]["message"].lower()
        assert "OSError" in worker["no directory"]["kinds"]
        assert "/proc/none/model.keras" in worker["no directory"]["message"]
        assert worker["extension"]["kinds"][0] == "ValueError"


@pytest.mark.parametrize("answer", ["y", "n"])
def test_the_chief_answers(cluster: Pool, tmp_path: pathlib.Path, answer: str) -> None:
    workers = cluster("multi_worker").call(f"{CASES}:answers", path=str(tmp_path), answer=answer)
    assert [worker["asked"] for worker in workers] == [1, 0]
    assert workers[0]["replaced"] == (answer == "y")
    assert [worker["failure"] for worker in workers] == [{}, {}]


def test_a_path_for_each_worker(cluster: Pool, tmp_path: pathlib.Path) -> None:
    workers = cluster("multi_worker").call(f"{CASES}:own_paths", path=str(tmp_path))
    assert workers == [["model.keras"]] * 2


@pytest.mark.parametrize(
    ("name", "written"), [("single", "again.keras"), ("multi_worker", "again")]
)
def test_a_kill_loses_nothing(
    cluster: Pool, tmp_path: pathlib.Path, name: str, written: str
) -> None:
    """The chief dies while it writes what is to replace a file, or a directory."""
    saving = cluster(name).submit(f"{CASES}:save_for_ever", path=str(tmp_path))
    _wait_for(tmp_path / "again" / "saved_model.pb")
    _kill_while_writing(cluster(name).process_ids()[0], tmp_path, written)
    with pytest.raises(CallError):
        saving.result()
    left = cluster("single").call(f"{CASES}:load_again", path=str(tmp_path))
    assert left == [["again", "again.keras"]]


def _kill_while_writing(process: int, folder: pathlib.Path, name: str) -> None:
    """Kills a process between the first byte of a file and its renaming."""
    begun = f".{name}.{socket.gethostname()}-*.partial/*"
    end = time.monotonic() + 60.0
    while True:
        assert time.monotonic() < end, f"{name} was not seen half-written."
        if any(folder.glob(begun)):
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.01)
            if any(folder.glob(begun)):
                break
            os.kill(process, signal.SIGCONT)
    os.kill(process, signal.SIGKILL)


def _wait_for(path: pathlib.Path, seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear."
        time.sleep(0.02)
