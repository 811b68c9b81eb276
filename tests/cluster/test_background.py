"""Tasks that join in a child process, each as a process of its own; no TensorFlow."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness.targets import free_ports
from tfdist import environment
from tfdist.cluster.spec import Task
from tfdist.config.strategy_config import StrategyConfig
from tfdist.launcher.plan import local_cluster

PROGRAM = """
import functools, os, signal, sys, time
from tfdist.cluster.rendezvous.background import in_background
from tfdist.cluster.rendezvous.join import join
from tfdist.cluster.spec import Task
from tfdist.errors import StartError
from tfdist.launcher.plan import local_cluster
index, what, timeout, *ports = sys.argv[1:]
cluster, task = local_cluster([int(port) for port in ports]), Task("worker", int(index))
meet = functools.partial(join, cluster, task, timeout=float(timeout), identity={}, offer={"a": "b"},
    keep_lines=True, report=lambda text: print(text, flush=True))
with in_background(meet) as joined:
    print("meanwhile", flush=True)
    if what == "leave":
        time.sleep(0.5)
        raise SystemExit("left")
    if what == "child is killed":
        time.sleep(0.3)
        os.system(f"kill -KILL $(ps -o pid= --ppid {os.getpid()} | head -n 1)")
    if what == "wait":
        time.sleep(60)
    try:
        report = joined()
    except StartError as error:
        print("StartError:", error)
        sys.exit(3)
print("offer", dict(report.offer), report.late)
for number, line in enumerate(report.lines):
    line.settimeout(10)
    if index == "0":
        line.sendall(b"for %d;" % number)
        line.close()
    else:
        print("line", line.recv(9))
"""


def begun(index: int, what: str, timeout: float, ports: Sequence[int]) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", PROGRAM, index, what, timeout, *ports]
    return subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out + err


def is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_tasks_join_and_their_connections_stay_open() -> None:
    ports = free_ports(3)
    results = [ended(each) for each in [begun(i, "join", 20, ports) for i in range(3)]]
    assert [status for status, _ in results] == [0, 0, 0], results
    assert all("offer {'a': 'b'} False" in text for _, text in results)
    heard = {re.findall(r"line b'(.*)'", text)[0] for _, text in results[1:]}
    assert heard == {"for 0;", "for 1;"}


def test_the_wait_goes_on_and_its_error_is_the_tasks() -> None:
    status, text = ended(begun(0, "join", 1, free_ports(2)))
    assert status == 3
    assert "StartError: The cluster did not come together within 1 s" in text


def test_a_task_that_ends_meanwhile_leaves_its_port() -> None:
    ports = free_ports(2)
    begin = time.monotonic()
    status, text = ended(begun(0, "leave", 60, ports))
    assert (status, text) == (1, "meanwhile\nleft\n")
    assert time.monotonic() - begin < 25
    assert is_free(ports[0])


def test_a_child_that_is_killed_is_named() -> None:
    status, text = ended(begun(0, "child is killed", 60, free_ports(2)))
    assert status == 3
    assert "The process that met the other tasks for this one has ended without a word" in text


def test_the_child_ends_with_a_parent_that_is_killed() -> None:
    ports = free_ports(2)
    parent = begun(0, "wait", 60, ports)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "meanwhile\n"
    until(lambda: not is_free(ports[0]))
    os.kill(parent.pid, signal.SIGKILL)
    ended(parent)
    until(lambda: is_free(ports[0]))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server"])
def test_a_task_imports_tensorflow_while_it_waits_for_the_others(
    tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow is imported')")
    config = StrategyConfig.of(strategy=strategy, processes=2, start_timeout=300.0)
    chief = strategy == "parameter_server"
    cluster = local_cluster(free_ports(3 if chief else 2), chief=chief, ps=1 if chief else 0)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.cli.task", "train.py"],
        env=environment.merged(
            {
                "PYTHONPATH": str(tmp_path),
                "TFDIST_CONFIG": config.to_json(),
                "TF_CONFIG": cluster.tf_config(Task("chief" if chief else "worker", 0)),
            }
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == "TensorFlow is imported\n"
    assert time.monotonic() - begin < 100
