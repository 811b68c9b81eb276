"""Real processes, without TensorFlow: what a failure means for each role, and restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tfdist.cluster.spec import Address, Task
from tfdist.launcher import root_cause, supervisor
from tfdist.launcher.plan import (
    BETWEEN_GRAPH,
    WITH_SERVERS,
    JobPlan,
    Program,
    Role,
    local_cluster,
    plan_local,
)

HEAD = """
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
kind, index = task["type"], task["index"]
def await_file(name):
    while not os.path.exists(name):
        time.sleep(0.01)
def first(name):
    "Whether this is the first start of a task."
    try:
        return bool(os.close(os.open(name, os.O_CREAT | os.O_EXCL)) is None)
    except FileExistsError:
        return False
def die():
    open("dead", "w")
    os.kill(os.getpid(), signal.SIGKILL)
def serve():
    print("serves", flush=True)
    open(f"{kind}{index}-{os.getpid()}", "w")
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan_of(
    script: str,
    *,
    workers: int = 2,
    ps: int = 1,
    chief: bool = True,
    roles: Mapping[str, Role] = WITH_SERVERS,
    **more: object,
) -> JobPlan:
    Path("task.py").write_text(HEAD + script)
    program = Program(script="task.py", config="", seed=1, env_only=True, roles=roles)
    ports = range(1, 1 + chief + workers + ps)
    cluster = local_cluster(ports, chief=chief, ps=ps)
    plan = plan_local(program, cluster=cluster, log_dir=Path("."), environ={})
    return dataclasses.replace(plan, **more)  # type: ignore[arg-type]


def run(script: str, **more: object) -> tuple[supervisor.Outcome, list[str]]:
    told: list[str] = []
    begin = time.monotonic()
    outcome = supervisor.run(
        plan_of(script, **more),  # type: ignore[arg-type]
        notify=lambda text, new_line: told.append(text),
        grace=2,
    )
    assert time.monotonic() - begin < 60
    return outcome, told


def starts(task: str) -> int:
    return len(list(Path(".").glob(f"{task}-*[0-9]")))


def test_the_job_ends_with_its_chief_and_servers_are_stopped() -> None:
    outcome, told = run("serve() if kind != 'chief' else time.sleep(0.5)")
    assert outcome == supervisor.Outcome(0)
    assert told == []


@pytest.mark.parametrize("kind", ["worker", "ps"])
def test_servers_that_end_with_their_chief_are_no_failure(kind: str) -> None:
    """They may be seen to end before it, and even fail while TensorFlow is torn down."""
    outcome, _ = run("await_file('over') if kind != 'chief' else open('over', 'w')")
    assert outcome.status == 0
    script = """
if kind == "chief":
    open("over", "w")
    os._exit(0)
else:
    await_file("over")
    sys.exit(1)
"""
    assert run(script.replace('"over")\n    sys', '"over"); time.sleep(1)\n    sys'))[0].status == 0


def test_training_goes_on_without_a_worker() -> None:
    script = """
if kind == "worker" and index == 1: die()
if kind != "chief": serve()
await_file("dead")
time.sleep(1)
"""
    outcome, told = run(script)
    assert outcome.status == 0
    assert told == [
        "worker 1 was ended by signal 9 (SIGKILL). Training goes on with one worker. "
        "Its log: worker-1.log"
    ]


def test_a_worker_is_started_again_in_its_place() -> None:
    script = """
if kind == "worker" and index == 1 and first("died"):
    print("before")
    sys.stdout.flush()
    die()
if kind == "chief":
    while len([n for n in os.listdir(".") if n.startswith("worker1-")]) < 1: time.sleep(0.01)
    sys.exit(0)
serve()
"""
    outcome, told = run(script, max_restarts=2)
    assert outcome.status == 0
    assert told == [
        "worker 1 was ended by signal 9 (SIGKILL). It is started again in its place "
        "(restart 1 of 2)."
    ]
    assert Path("worker-1.log").read_text().splitlines() == [
        "before",
        "tfdist: worker 1 is started again (restart 1 of 2)",
        "serves",
    ]


def test_the_job_fails_when_all_workers_are_gone() -> None:
    script = """
if kind == "worker":
    if index == 1:
        await_file("left")
        time.sleep(0.5)
    open("left", "w")
    print("no more memory")
    sys.exit(4 + index)
serve() if kind == "ps" else time.sleep(60)
"""
    outcome, told = run(script)
    assert len(told) == 1
    assert told[0].startswith("worker 0 failed with exit status 4. Training goes on with one")
    assert outcome.status == 5
    assert outcome.message.startswith("worker 1 failed with exit status 5.\n")
    assert "  no more memory" in outcome.message
    assert stopped_with_it(outcome.message) == {"chief 0", "ps 0"}
    assert "Earlier, worker 0 failed with exit status 4." in outcome.message


def test_a_lost_ps_is_named_not_the_chief_that_followed() -> None:
    script = """
if kind == "ps": die()
if kind == "chief":
    await_file("dead")
    time.sleep(0.5)
    sys.exit("tensorflow.python.framework.errors_impl.UnavailableError: Socket closed")
serve()
"""
    outcome, _ = run(script)
    assert outcome.status == 137
    assert outcome.message.startswith("ps 0 was ended by signal 9 (SIGKILL).")
    assert "chief 0 failed with exit status 1 because it lost another task" in outcome.message


@pytest.mark.parametrize("roles", [WITH_SERVERS, {}])
def test_the_whole_job_is_started_again(roles: Mapping[str, Role]) -> None:
    script = """
print("start")
open(f"{kind}{index}-{os.getpid()}", "w")
while len({n.split("-")[0] for n in os.listdir(".") if n[-1].isdigit()}) < 4: time.sleep(0.01)
if kind == "ps" and first("died"): die()
if kind == "ps" and roles: serve()
def count(name): return len([n for n in os.listdir(".") if n.startswith(f"{name}-")])
while min(map(count, ("chief0", "worker0", "worker1"))) < 2: time.sleep(0.01)
"""
    outcome, told = run(f"roles = {bool(roles)}\n" + script, roles=roles, max_restarts=2)
    assert outcome.status == 0
    assert told == [
        "ps 0 was ended by signal 9 (SIGKILL); starting the job again (restart 1 of 2). "
        "The script goes on from its last checkpoint. Its log: ps-0.log"
    ]
    assert starts("chief0") == starts("worker1") == 2
    again = "tfdist: the job is started again (restart 1 of 2)"
    assert Path("chief-0.log").read_text().splitlines() == ["start", again, "start"]


def test_restarts_run_out() -> None:
    outcome, told = run("print('x'); sys.exit(7 if kind == 'chief' else 0)", max_restarts=2)
    assert [text.partition("(")[2][:14] for text in told] == ["restart 1 of 2", "restart 2 of 2"]
    assert outcome.status == 7
    assert Path("chief-0.log").read_text().count("x\n") == 3


def test_a_mistake_in_the_call_is_not_repeated() -> None:
    outcome, told = run("sys.exit(2 if kind == 'chief' else 0)", max_restarts=2)
    assert (outcome.status, told) == (2, [])


@pytest.mark.parametrize("begun", [False, True])
def test_a_worker_that_dies_during_the_start_ends_the_job(begun: bool) -> None:
    """The others wait for it then, so nothing can go on."""
    script = """
if kind == "worker" and index == 0: die()
if kind != "chief": serve()
await_file("dead")
time.sleep(1.5)
"""
    with contextlib.ExitStack() as stack:
        chief = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = chief.getsockname()[1]
        if begun:
            thread = threading.Thread(target=greet_as_grpc, args=(chief,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(chief.shutdown, socket.SHUT_RDWR)
        else:
            chief.close()
        outcome, told = run(script, begins_at=Address("127.0.0.1", port))
    assert outcome.status == (0 if begun else 137)
    assert len(told) == begun
    if not begun:
        assert "worker 0 was ended by signal 9" in outcome.message
        assert "before the training had begun" in outcome.message


def greet_as_grpc(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            client = server.accept()[0]
            client.sendall(b"\0\0\0\4\0\0\0\0\0")
            client.recv(100)
            client.close()


def stopped_with_it(message: str) -> set[str]:
    """The tasks that a message names, which end in any order."""
    line = next(line for line in message.splitlines() if line.startswith("Stopped with it: "))
    return set(line.partition(": ")[2].partition(".")[0].split(", "))


def test_every_worker_is_waited_for_and_no_ps() -> None:
    roles = BETWEEN_GRAPH
    done, _ = run("serve() if kind == 'ps' else time.sleep(index / 2)", chief=False, roles=roles)
    assert done == supervisor.Outcome(0)
    failing = "sys.exit(3) if kind == 'worker' and index == 1 else time.sleep(60)"
    outcome, _ = run(failing, chief=False, roles=roles)
    assert outcome.status == 3
    assert stopped_with_it(outcome.message) == {"worker 0", "ps 0"}
    outcome, _ = run("sys.exit(3) if kind == 'ps' else time.sleep(60)", chief=False, roles=roles)
    assert outcome.message.startswith("ps 0 failed with exit status 3.")


LAUNCHER = """
import dataclasses, os, sys
from pathlib import Path
from tfdist.launcher import supervisor
from tfdist.launcher.plan import local_cluster, plan_local
from tfdist.launcher.plan import WITH_SERVERS, Program
program = Program(script="task.py", config="", seed=1, env_only=True, roles=WITH_SERVERS)
cluster = local_cluster([1, 2, 3], chief=True, ps=1)
plan = plan_local(program, cluster=cluster, log_dir=Path("."), environ={})
plan = dataclasses.replace(plan, max_restarts=9)
sys.exit(supervisor.run(plan).status)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_task_ends_with_its_launcher(number: signal.Signals) -> None:
    plan_of("die() if kind == 'worker' and first('died') else serve()")
    with subprocess.Popen([sys.executable, "-c", LAUNCHER]) as launcher:
        try:
            deadline = time.monotonic() + 10
            while sum(map(starts, ("chief0", "worker0", "ps0"))) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            launcher.send_signal(number)
            assert launcher.wait(10) == (-9 if number == signal.SIGKILL else 128 + number)
        finally:
            launcher.kill()
    numbers = [int(path.name.partition("-")[2]) for path in Path(".").glob("*0-*[0-9]")]
    assert len(numbers) == 3
    deadline = time.monotonic() + 5
    while any(map(is_alive, numbers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
        stat = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_server_that_lost_its_chief_is_no_cause() -> None:
    said = "tfdist: chief 0 at a:1 has gone without a farewell: it was killed, or unplugged (x)."
    server = root_cause.Ending(Task("ps", 0), 1, None, ["tfdist: ps 0 serves at a:2", said])
    chief = root_cause.Ending(Task("chief", 0), 1, None, ["ValueError: x"])
    assert root_cause.root_cause([server, chief]) is chief
    killed = root_cause.Ending(Task("ps", 0), -9, None, ["UNAVAILABLE: Connection reset by peer"])
    assert root_cause.root_cause([killed, chief]) is killed
