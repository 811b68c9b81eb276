"""Jobs on Ray: a real head node, real actors, and nothing left of them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.targets import free_ports
from tests.harness.tiers import seldom
from tests.jobs.test_jobs import SCRIPT, TFDIST, left_over, log, run, wait_until_gone
from tfdist import environment

#: Seconds for Ray to come up on a machine that is busy, and to notice an end.
START_SECONDS = 120
NOTICED_SECONDS = 30

#: Says what goes on in a Ray, at each line that it reads.
PROBE = """
import json, sys, ray
from ray.util import list_named_actors, placement_group_table
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("ready", flush=True)
for _ in sys.stdin:
    groups = [g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
    actors = [a["name"] for a in list_named_actors(all_namespaces=True)]
    free = ray.available_resources().get("CPU", 0)
    print(json.dumps({"groups": groups, "actors": actors, "free": free}), flush=True)
"""

#: The second of two tasks fails as the other goes on.
FAILING = """
import json, os, sys, time
place = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
if place == 1:
    print("about to fail", file=sys.stderr)
    sys.exit(17)
time.sleep(600)
"""

#: A task with a child of its own.
ENDLESS = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
print("STARTED", flush=True)
time.sleep(600)
"""

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install 'tfdist[ray]'", allow_module_level=True)


class Head:
    """A Ray of the tests' own.

    Attributes:
        address: of its head node.
        environ: what a job sets that is to use it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        port = free_ports(1)[0]
        self.address = f"127.0.0.1:{port}"
        command = (
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--port", str(port), "--temp-dir", str(folder / "t"), "--disable-usage-stats"),
            *("--num-cpus", "4", "--num-gpus", "0", "--include-dashboard", "false"),
            *("--object-store-memory", str(100 << 20)),
        )
        # Ray keeps a token in the home directory, which decides whether it wants one.
        self.environ = {"RAY_ADDRESS": self.address, "HOME": str(folder)}
        self._said = (folder / "head.txt").open("w+b")
        self._process = subprocess.Popen(
            command,
            stdout=self._said,
            stderr=self._said,
            env=environment.merged({"HOME": str(folder)}),
        )

    def await_start(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while b"runtime started" not in (text := (self.folder / "head.txt").read_bytes()):
            assert self._process.poll() is None, text.decode()
            assert time.monotonic() < deadline, text.decode()
            time.sleep(0.1)
        self._probe = subprocess.Popen(
            [sys.executable, "-c", PROBE, self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment.merged(self.environ),
            text=True,
        )
        assert self._probe.stdout is not None
        assert self._probe.stdout.readline() == "ready\n", (self.folder / "head.txt").read_text()

    def state(self) -> dict[str, Any]:
        """The placement groups and named actors that there are, and the CPUs that are free."""
        assert self._probe.stdin is not None
        assert self._probe.stdout is not None
        print(file=self._probe.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._probe.stdout.readline())
        return found

    def left(self) -> dict[str, Any]:
        """The same when nothing is left, or else after a while."""
        deadline = time.monotonic() + NOTICED_SECONDS
        while (state := self.state()) != CLEAN and time.monotonic() < deadline:
            time.sleep(0.1)
        return state

    def close(self) -> None:
        for process in (getattr(self, "_probe", None), self._process):
            if process is not None:
                process.terminate()
        for process in (getattr(self, "_probe", None), self._process):
            if process is not None:
                process.wait(timeout=60)
        if hasattr(self, "_probe"):
            self._probe.stdin.close()
            self._probe.stdout.close()
        self._said.close()


CLEAN = {"groups": [], "actors": [], "free": 4.0}


@pytest.fixture(scope="module")
def short_folder() -> Iterator[Path]:
    """Ray puts sockets into its directory, whose paths must not be long."""
    made = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def head(short_folder: Path) -> Iterator[Head]:
    made = Head(short_folder)
    try:
        made.await_start()
        yield made
    finally:
        made.close()


def processes_with(word: str) -> list[str]:
    """Command lines that have a word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line and entry.parent.name != str(os.getpid()):
            found.append(line)
    return found


@dataclasses.dataclass
class Alone:
    """A job of one process, on a Ray of its own.

    Attributes:
        done: how it ended.
        left: what was left of that Ray.
    """

    done: subprocess.CompletedProcess[str]
    left: list[str]


@pytest.fixture(scope="module")
def on_own_ray(tmp_path_factory: pytest.TempPathFactory, short_folder: Path) -> Alone:
    folder, own = tmp_path_factory.mktemp("alone"), short_folder / "own"
    (folder / "train.py").write_text(SCRIPT)
    own.mkdir()
    job = on_ray("-s", "single", "--seed", 3, "train.py")
    environ = {"RAY_ADDRESS": None, "TF_CONFIG": None, "RAY_TMPDIR": str(own), "HOME": str(own)}
    done = run(folder, *job, **environ)
    assert done.returncode == 0, done.stderr
    return Alone(done, processes_with(str(own)))


FILES = {"train.py": SCRIPT, "failing.py": FAILING, "endless.py": ENDLESS}


def on_ray(*options: object) -> list[object]:
    return [*TFDIST, "run", "--on", "ray", *options]


@pytest.mark.core
def test_two_workers_train_what_one_process_trains(head: Head, alone: float, folder: Path) -> None:
    job = on_ray("-s", "multi_worker", "-n", 2, "--seed", 3, "train.py", "--own")
    two = run(folder, *job, **head.environ)
    assert two.returncode == 0, two.stderr
    ((number, arguments),) = re.findall(r"^RESULT (\S+) (.*)$", two.stdout, re.MULTILINE)
    assert float(number) == pytest.approx(alone, 1e-5)
    assert arguments == "['--own'] __main__"
    assert f"RESULT {number}" in log(folder, "worker-1")
    assert head.left() == CLEAN
    assert left_over(folder) == []


@pytest.mark.seldom  # Other engines start servers, and Ray starts workers, above.
def test_a_parameter_server(head: Head, folder: Path) -> None:
    job = on_ray("-s", "parameter_server", "-n", 1, "--ps", 1, "--seed", 3, "train.py")
    done = run(folder, *job, **head.environ)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"RESULT (\S+)", done.stdout)) == 1
    assert "worker 0 at" in done.stderr
    assert head.left() == CLEAN


def test_a_task_that_fails_ends_the_job_and_is_named_with_its_node(
    head: Head, folder: Path
) -> None:
    options = ["--engine-args", f"--address={head.address} --cpus-per-task=2"]
    job = on_ray("-s", "multi_worker", "-n", 2, "--grace", 1, *options, "failing.py")
    done = run(folder, *job, HOME=head.environ["HOME"])
    assert done.returncode == 17, done.stderr
    host = re.findall(r"worker 1 at (\S+):\d+", done.stderr)[0]
    assert f"worker 1 on {host} failed with exit status 17" in done.stderr
    assert "about to fail" in done.stderr
    assert head.left() == CLEAN
    assert left_over(folder) == []


@pytest.mark.parametrize("number", [*seldom(signal.SIGTERM), signal.SIGKILL])
def test_the_launchers_end_leaves_nothing(head: Head, folder: Path, number: signal.Signals) -> None:
    job = subprocess.Popen(
        [*map(str, on_ray("--log-dir", "logs", "--job-name", "mine", "endless.py"))],
        cwd=folder,
        env=environment.merged(head.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "STARTED\n"
        assert head.state() == {"groups": ["mine"], "actors": ["mine: worker 0"], "free": 3.0}
        job.send_signal(number)
        ended = job.wait(timeout=NOTICED_SECONDS)
    finally:
        job.kill()
        job.wait()
        job.stdout.close()
    assert ended == (143 if number == signal.SIGTERM else -number)
    assert wait_until_gone(folder, NOTICED_SECONDS) == []
    assert head.left() == CLEAN
    assert "STARTED" in (folder / "logs/worker-0.log").read_text()


def test_resources_that_ray_does_not_have_are_named(head: Head, folder: Path) -> None:
    begun = time.monotonic()
    options = ["-s", "multi_worker", "-n", 2, "--gpus-per-task", 3, "--start-timeout", 1]
    done = run(folder, *on_ray(*options, "train.py"), **head.environ)
    assert done.returncode == 3, done.stderr
    assert time.monotonic() - begun < START_SECONDS
    said = " ".join(done.stderr.split())
    assert "Asked for: 2 x (CPU 1, GPU 3), PACK" in said
    assert "The cluster has: CPU 4 (4 free), GPU 0 (0 free)" in said
    assert head.left() == CLEAN


def test_a_ray_that_does_not_answer_is_named(folder: Path) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    done = run(folder, *on_ray("train.py"), RAY_ADDRESS=address)
    assert done.returncode == 3, done.stderr
    assert f"No Ray answers at {address}" in done.stderr


@pytest.mark.seldom  # Slow: another Ray is started.
def test_without_a_ray_one_is_started_for_the_job(on_own_ray: Alone) -> None:
    said = "No Ray was started on this machine: one is started for this job alone."
    assert said in on_own_ray.done.stderr
    assert on_own_ray.left == []


def test_a_dry_run_starts_nothing(folder: Path) -> None:
    options = ["-s", "parameter_server", "-n", 1, "--gpus-per-task", 1, "--dry-run"]
    done = run(folder, *on_ray(*options, "train.py"), RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    assert "#   worker 0: CPU 1, GPU 1" in done.stdout
    assert "#   ps 0: CPU 1\n" in done.stdout
    assert "python -m tfdist.cli.task train.py" in done.stdout
    assert [each.name for each in folder.iterdir() if each.is_dir()] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine-args", "--nodes=2"], "unrecognized arguments: --nodes=2"),
        (["--hosts", "a:1"], "--hosts a:1 conflicts with --on ray"),
        (["--image", "x"], "--image goes with --on"),
        (["--max-restarts", 1], "--max-restarts 1 conflicts with --on ray"),
    ],
)
def test_bad_input(folder: Path, options: list[object], words: str) -> None:
    done = run(folder, *on_ray(*options, "train.py"))
    assert done.returncode == 2, done.stderr
    assert words in " ".join(done.stderr.split())
