"""What `--on ray` asks for, plans and passes on, without Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfdist.cluster.spec import Address, Task
from tfdist.errors import ConfigError
from tfdist.launcher.backends import ray_relay
from tfdist.launcher.backends.ray import (
    Bundle,
    Options,
    Seat,
    bundles,
    cluster_of,
    options,
    plan_on,
)
from tfdist.launcher.backends.ray_actor import Runner
from tfdist.launcher.backends.ray_driver import lacking, short
from tfdist.launcher.backends.ray_relay import END, frame
from tfdist.launcher.plan import WITH_SERVERS, JobPlan, Program

SERVING = {"chief": 1, "worker": 2, "ps": 1}
LONGEST = 20.0


def test_arguments_of_the_engine() -> None:
    assert options(None) == Options(address=None, cpus_per_task=1, placement="PACK")
    words = "--address=a:6379 --cpus-per-task 0.5 --placement SPREAD"
    assert options(words) == Options(address="a:6379", cpus_per_task=0.5, placement="SPREAD")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--cpus-per-task=0", "--cpus-per-task=0 is no number of CPUs"),
        ("--cpus-per-task=many", "invalid float value: 'many'"),
        ("--adress=a:1", "unrecognized arguments: --adress=a:1. There are --address"),
        ("--placement=ANY", "invalid choice: 'ANY'"),
        ("--address=ray://a:10001", "give HOST:PORT of the head node"),
        ("--address='a:1", "cannot be split into words"),
    ],
)
def test_arguments_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(text)
    assert words in str(caught.value)


def test_only_tasks_that_train_ask_for_gpus() -> None:
    asked = {str(each.task): each.resources for each in bundles(SERVING, 2, 4)}
    assert asked == {
        "chief 0": {"CPU": 2},
        "worker 0": {"CPU": 2, "GPU": 4},
        "worker 1": {"CPU": 2, "GPU": 4},
        "ps 0": {"CPU": 2},
    }


def seat(host: str, port: int, *gpus: str) -> Seat:
    return Seat(host=host, port=port, python="/there/python", gpus=gpus, folder=True, facts={})


def placed(counts: dict[str, int], gpus: int = 0) -> list[tuple[Bundle, Seat]]:
    seats = [seat("a", 1, "0"), seat("a", 2, "1"), seat("b", 1, "0"), seat("b", 2, "1")]
    return list(zip(bundles(counts, 1, gpus), seats, strict=False))


def planned(counts: dict[str, int], *, gpus: int = 0, clustered: bool = True) -> JobPlan:
    roles = WITH_SERVERS if "ps" in counts else {}
    program = Program(script="s.py", config="{}", seed=1, roles=roles)
    environ = {"MINE": "1", "HOME": "/home", "RAY_JOB_ID": "7", "TF_CPP_MIN_LOG_LEVEL": "0"}
    return plan_on(
        program, placed(counts, gpus), clustered=clustered, log_dir=Path("logs"), environ=environ
    )


def test_the_cluster_is_where_ray_has_placed_the_tasks() -> None:
    assert cluster_of(placed(SERVING)).as_dict() == {
        "chief": ["a:1"],
        "worker": ["a:2", "b:1"],
        "ps": ["b:2"],
    }


def test_a_plan_for_nodes() -> None:
    plan = planned(SERVING, gpus=1)
    assert [str(each.task) for each in plan.tasks] == ["chief 0", "worker 0", "worker 1", "ps 0"]
    assert [each.host for each in plan.tasks] == ["a", "a", "b", "b"]
    assert [each.environ["CUDA_VISIBLE_DEVICES"] for each in plan.tasks] == ["", "1", "0", ""]
    assert plan.shown == Task("chief", 0)
    assert plan.begins_at == Address("a", 1)
    for each in plan.tasks:
        assert each.command[0] == "/there/python"
        assert json.loads(each.environ["TF_CONFIG"] or "")["task"]["type"] == each.task.type
        assert (each.environ["MINE"], each.environ["TF_CPP_MIN_LOG_LEVEL"]) == ("1", "0")
        assert not {"HOME", "RAY_JOB_ID"} & set(each.environ)


def test_gpus_that_were_not_asked_for_are_not_used() -> None:
    assert {each.environ["CUDA_VISIBLE_DEVICES"] for each in planned({"worker": 2}).tasks} == {""}


def test_a_process_alone_is_told_no_cluster() -> None:
    plan = planned({"worker": 1}, clustered=False)
    assert plan.cluster is None
    assert "TF_CONFIG" not in plan.tasks[0].environ


def test_what_is_lacking_is_said_in_numbers() -> None:
    asked = [each.resources for each in bundles({"worker": 2}, 1, 8)]
    said = lacking(asked, "PACK", {"CPU": 4.0}, {"CPU": 1.0})
    assert said == (
        "Asked for: 2 x (CPU 1, GPU 8), PACK. The cluster has: CPU 4 (1 free), GPU 0 (0 free)."
    )
    assert short(ValueError("\n  many\n  words. \n")) == "words"


class Door:
    """A driver's end of one relay."""

    def __init__(self, folder: Path) -> None:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(folder / "d"))
            door.listen()
            door.settimeout(LONGEST)
            self.relay = subprocess.Popen(
                [sys.executable, "-I", "-S", ray_relay.__file__, str(folder / "d"), "5"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self.line, _ = door.accept()
        self.line.settimeout(LONGEST)
        assert self.line.recv(64) == b"5\n"

    def ended(self) -> tuple[int, bytes, bytes]:
        out, error = self.relay.communicate(timeout=LONGEST)
        return self.relay.returncode, out, error


@pytest.fixture
def door(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("r")
    made = Door(folder)
    try:
        yield made
    finally:
        made.line.close()
        made.relay.kill()
        made.relay.communicate()


@pytest.mark.parametrize(("status", "seen"), [(0, 0), (17, 17), (-9, 137)])
def test_a_relay_writes_the_output_and_ends_as_the_task(door: Door, status: int, seen: int) -> None:
    said = frame(1, b"out\n" * 30000) + frame(2, b"error\n") + frame(END, str(status).encode())
    door.line.sendall(said)
    assert door.ended() == (seen, b"out\n" * 30000, b"error\n")


def test_a_relay_passes_signals_on(door: Door) -> None:
    door.line.sendall(frame(1, b"!"))
    assert door.relay.stdout is not None
    assert door.relay.stdout.read(1) == b"!"  # From here on it listens to signals.
    for number in (signal.SIGINT, signal.SIGTERM):
        door.relay.send_signal(number)
        assert door.line.recv(1) == bytes([number])
    door.line.sendall(frame(END, b"-15"))
    assert door.ended()[0] == 143


def test_a_relay_whose_driver_has_gone(door: Door) -> None:
    door.line.close()
    status, _, error = door.ended()
    assert status == 1
    assert b"the process that talks to Ray has ended" in error


def output_of(runner: Runner) -> tuple[dict[int, bytes], int]:
    """All output of a runner's task, and its return code."""
    found = {1: b"", 2: b""}
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        blocks, status = runner.poll(0.2)
        for number, data in blocks:
            found[number] += data
        if status is not None:
            return found, status
    raise AssertionError("the task did not end")


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def test_a_runner_tells_output_and_status(tmp_path: Path) -> None:
    runner = Runner()
    code = (
        "import os, sys; print(os.getcwd(), os.environ['MINE'], flush=True); "
        "print('error', file=sys.stderr); print('x' * 200000); sys.exit(3)"
    )
    assert runner.start(python(code), {"MINE": "1"}, str(tmp_path), 2) is None
    found, status = output_of(runner)
    assert status == 3
    assert found[1] == f"{tmp_path} 1\n".encode() + b"x" * 200000 + b"\n"
    assert found[2] == b"error\n"
    runner.end(1)


def test_a_runner_that_cannot_start(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert "No such file" in str(Runner().start(["true"], {}, nowhere, 1))


def test_a_runner_sends_signals_that_ray_blocks_in_its_workers(tmp_path: Path) -> None:
    runner = Runner()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        runner.start(python("print('on', flush=True); import time; time.sleep(60)"), {}, "/", 1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while not runner.poll(1)[0]:
        pass
    runner.signal(signal.SIGINT)
    assert output_of(runner)[1] == -signal.SIGINT


DYING = """
import sys, time
from tfdist.launcher.backends.ray_actor import Runner
runner = Runner()
child = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('on', flush=True)"
runner.start([sys.executable, "-I", "-S", "-c", child + "; time.sleep(60)"], {}, ".", 1)
while not runner.poll(1)[0]:
    pass
print(runner._process.pid, flush=True)
time.sleep(60)
"""


def group(number: int) -> bool:
    """Whether a process group still has processes that run."""
    stats = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats.append(entry.read_text().rpartition(")")[2].split())
        except OSError:
            continue
    return any(int(stat[2]) == number and stat[0] != "Z" for stat in stats)


def test_a_task_and_its_children_end_with_an_actor_that_is_killed(tmp_path: Path) -> None:
    """Ray kills an actor and its direct children: here, the task itself but not its child."""
    with subprocess.Popen(
        [sys.executable, "-c", DYING], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as actor:
        assert actor.stdout is not None
        number = int(actor.stdout.readline())
        assert group(number)
        actor.kill()
        os.kill(number, signal.SIGKILL)
    deadline = time.monotonic() + LONGEST
    while group(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group(number)
