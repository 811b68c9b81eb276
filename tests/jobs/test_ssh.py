"""Jobs on several machines by ssh: real hosts, real sshd, real loss of a host."""

from __future__ import annotations

import re
import signal
import subprocess
import time

import pytest

from tests.harness.hosts import FAR, NEAR, missing, two_hosts
from tests.harness.tiers import seldom
from tests.jobs.test_jobs import ENDLESS, SCRIPT, TFDIST, left_over, run, wait_until_gone
from tfdist import environment

LACKING = missing()
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

#: Until a host that is gone has been noticed on both sides, and all has been ended.
NOTICED_SECONDS = 75


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


FILES = {"train.py": SCRIPT, "endless.py": ENDLESS}


def launch(hosts, *options):
    both = ["--hosts", f"{NEAR}:1,{FAR}:1", "--ssh-args", hosts.ssh_args]
    return hosts.on_near(*TFDIST, "run", *both, *options)


@pytest.fixture
def endless(hosts, folder):
    """An endless training on both hosts, under way."""
    job = subprocess.Popen(
        launch(hosts, "-s", "multi_worker", "endless.py"),
        cwd=folder,
        env=environment.snapshot(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        far = folder / "tfdist-logs/latest/worker-1.log"
        deadline = time.monotonic() + 90
        while not far.exists() or "STARTED" not in far.read_text():
            assert time.monotonic() < deadline, "the job did not start"
            time.sleep(0.1)
        yield job
    finally:
        job.kill()
        job.wait()
        job.stderr.close()
        hosts.mend()


@pytest.mark.core
@pytest.mark.parametrize("strategy", ["multi_worker", *seldom("horovod")])
def test_two_hosts_train_what_one_process_trains(hosts, folder, alone, strategy):
    two = run(folder, *launch(hosts, "-s", strategy, "--seed", 3, "train.py", "--own"))
    assert two.returncode == 0, two.stderr
    ((number, arguments),) = re.findall(r"^RESULT (\S+) (.*)$", two.stdout, re.MULTILINE)
    assert float(number) == pytest.approx(alone, 1e-5)
    assert arguments == "['--own'] __main__"
    far = (folder / "tfdist-logs/latest/worker-1.log").read_text()
    assert f"RESULT {number}" in far
    assert f"worker 1 at {FAR}:" in two.stderr
    assert left_over(folder) == []


@pytest.mark.seldom  # Other engines start servers.
def test_parameter_servers_on_two_hosts(hosts, folder):
    options = ["-s", "parameter_server", "-n", 2, "--ps", 2, "--seed", 3, "train.py"]
    done = run(folder, *launch(hosts, *options))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"RESULT (\S+)", done.stdout)) == 1
    assert f"ps 1 at {FAR}:" in done.stderr
    assert left_over(folder) == []


def test_a_cut_cable_ends_the_job_and_names_the_host(hosts, folder, endless):
    hosts.cut()
    begun = time.monotonic()
    _, said = endless.communicate(timeout=NOTICED_SECONDS)
    assert time.monotonic() - begun < NOTICED_SECONDS
    assert endless.returncode != 0
    assert f"tfdist: worker 1 on {FAR} was lost" in said, said
    assert wait_until_gone(folder, NOTICED_SECONDS) == []


@pytest.mark.parametrize("number", [*seldom(signal.SIGINT), signal.SIGKILL])
def test_the_launchers_end_ends_the_tasks_on_both_hosts(folder, endless, number):
    endless.send_signal(number)
    endless.wait(timeout=30)
    assert wait_until_gone(folder, 30) == []


def test_every_host_that_cannot_be_used_is_named(hosts, folder):
    done = run(
        folder,
        *hosts.on_near(*TFDIST, "run", "-s", "multi_worker", "--start-timeout", 5),
        *("--hosts", f"{NEAR},{FAR},10.77.31.8,10.77.31.9", "--ssh-args", hosts.ssh_args),
        "train.py",
    )
    assert done.returncode == 3
    assert "10.77.31.8" in done.stderr
    assert "10.77.31.9" in done.stderr
    assert f"{FAR}:" not in done.stderr


def test_an_interpreter_that_is_not_there(hosts, folder):
    python = "/nowhere/python"
    done = run(folder, *launch(hosts, "-s", "multi_worker", "--remote-python", python, "train.py"))
    assert done.returncode == 3
    assert f"{FAR}: /nowhere/python does not run tfdist" in done.stderr
