"""Elastic jobs of real processes, without TensorFlow: which ends start another world."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from tfdist.cluster.ports import HeldPorts
from tfdist.errors import ConfigError, StartError
from tfdist.launcher import elastic
from tfdist.launcher.elastic_directory import ElasticDirectory, Position
from tfdist.launcher.plan import Program, local_cluster, plan_local
from tfdist.launcher.supervisor import Screen

HEAD = """
import json, os, pathlib, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
rank, size = config["task"]["index"], len(config["cluster"]["worker"])
place = pathlib.Path("states")
worlds = len(list(pathlib.Path(".").glob(f"world-*-{rank}")))
open(f"world-{worlds}-{size}-{rank}", "w")
"""


def run(folder, body, *, slots=lambda: 2, least=1, most=4, timeout=5.0, restarts=3):
    (folder / "job.py").write_text(HEAD + body)
    said: list[str] = []

    @contextlib.contextmanager
    def make(count):
        with HeldPorts(count) as held:
            program = Program(script="job.py", config="", seed=None, env_only=True)
            cluster = local_cluster(held.ports)
            yield plan_local(program, cluster=cluster, log_dir=folder, environ={})

    world = elastic.World(
        least=least,
        most=most,
        slots=slots,
        problem=lambda: None,
        timeout=timeout,
        states=ElasticDirectory(folder / "states"),
        max_restarts=restarts,
    )
    screen = Screen(None, said.append, lambda text, _: said.append(text))
    return elastic.run(make, world, grace=1.0, screen=screen), said


def sizes(folder):
    """The number of processes of each world, in order."""
    ran = sorted(path.name.split("-")[1:3] for path in folder.glob("world-*-*-0"))
    return [int(size) for _, size in ran]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_that_ends_well_runs_in_one_world(here: Path):
    outcome, said = run(here, "sys.exit(0)")
    assert (outcome.status, said, sizes(here)) == (0, [], [2])


def test_a_lost_process_leads_to_another_world(here: Path):
    body = """
if worlds == 0:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    (place / f"state-000000-00000003-000000000007-{rank}").write_text("")
    sys.exit(75)
"""
    outcome, said = run(here, body)
    assert outcome.status == 0
    assert "worker 1 was ended by signal 9 (SIGKILL)" in said[0]
    assert "goes on from epoch 4, step 7" in said[0]
    assert sizes(here) == [2, 2]


def test_the_job_is_asked_to_stop_when_more_can_run(here: Path):
    body = """
until = time.monotonic() + 20
while size == 2 and not (place / "stop").exists() and time.monotonic() < until:
    time.sleep(0.02)
sys.exit(75 if size == 2 else 0)
"""
    started = [here / f"world-0-2-{rank}" for rank in range(2)]
    slots = lambda: 3 if all(path.exists() for path in started) else 2  # noqa: E731
    outcome, said = run(here, body, slots=slots)
    assert outcome.status == 0
    assert "3 processes can run now, instead of 2" in said[0]
    assert sizes(here) == [2, 3]


def test_an_error_of_the_script_ends_the_job(here: Path):
    body = "sys.exit(75 if rank == 0 else 'my own mistake')"
    outcome, _ = run(here, body)
    assert outcome.status == 1
    assert "worker 1 failed with exit status 1" in outcome.message
    assert sizes(here) == [2]


def test_restarts_are_bounded(here: Path):
    outcome, said = run(here, "os.kill(os.getpid(), signal.SIGKILL)", restarts=2)
    assert outcome.status == 137
    assert len(said) == 2
    assert "restart 2 of 2" in said[-1]


def test_too_few_slots_are_waited_for_and_named(here: Path):
    with pytest.raises(StartError, match="1 processes can run, fewer than --min-np 2"):
        run(here, "", slots=lambda: 1, least=2, timeout=0.3)


def test_states_are_kept_by_position(here: Path):
    place = ElasticDirectory(here / "place")
    place.begin()
    assert place.newest() is None
    for position in (Position(0, 2, 9), Position(0, 10, 1), Position(0, 9, 50)):
        place.write(position, 1, b"content")
    place.request_stop()
    assert place.stop_requested()
    newest = place.newest()
    assert newest is not None
    assert newest[0] == Position(0, 10, 1)
    assert newest[1].read_bytes() == b"content"
    place.begin()
    assert not place.stop_requested()
    assert len(list(place.path.iterdir())) == 2
    assert place.newest() == newest


@pytest.mark.parametrize(
    ("text", "slots"),
    [("localhost:4\n", 4), ("localhost\n127.0.0.1:2\n\n", 3), ("[::1]:2", 2), ("", 0)],
)
def test_slots(text, slots):
    assert elastic.slots_of(text, "hosts.sh") == slots


@pytest.mark.parametrize(
    ("text", "words"), [("localhost:many", "localhost:many"), ("far:2", "another machine")]
)
def test_lines_that_are_no_hosts(text, words):
    with pytest.raises(ConfigError, match=words):
        elastic.slots_of(text, "hosts.sh")


@pytest.mark.parametrize(
    ("script", "words"),
    [("#!/bin/sh\nexit 3\n", "exit status 3"), ("#!/bin/sh\necho two\n", "another machine")],
)
def test_scripts_that_fail(here: Path, script, words):
    path = here / "hosts.sh"
    path.write_text(script)
    path.chmod(0o755)
    with pytest.raises(ConfigError, match=words):
        elastic.Discovery(str(path))


def test_discovery_follows_its_script(here: Path):
    path = here / "hosts.sh"
    path.write_text("#!/bin/sh\ncat slots\n")
    path.chmod(0o755)
    (here / "slots").write_text("localhost:1")
    with elastic.Discovery(str(path)) as found:
        assert found.slots == 1
        (here / "slots").write_text("localhost:5")
        deadline = time.monotonic() + 10
        while found.slots != 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found.slots == 5
        (here / "slots").unlink()
        while (news := found.take_problem()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert news is not None
        assert "failed" in news
        assert found.slots == 5
