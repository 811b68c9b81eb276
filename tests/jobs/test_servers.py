"""Jobs with parameter servers: kills, restarts, and programs that every task runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.targets import free_ports
from tests.harness.tiers import seldom
from tests.jobs.test_jobs import DEADLINE, ROOT, TFDIST, left_over, printed, run
from tfdist import environment

#: Trains until the file `enough` is there; the second start of the job ends at once.
ENDLESS = """
import pathlib, time
import keras, numpy as np

class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pathlib.Path("training").touch()
        if pathlib.Path("enough").exists():
            self.model.stop_training = True
        time.sleep(0.02)

again = pathlib.Path("training").exists()
x = np.zeros((64, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=8, epochs=1 if again else 10_000, verbose=0, callbacks=[Watch()])
print("DONE", int(model.optimizer.iterations))
"""

#: Reads a model's weights for ever.
READING = """
import pathlib
import keras

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
while model.get_weights():
    pathlib.Path("training").touch()
"""

#: Makes a function when training has ended, which TensorFlow sends to all workers.
LATER = (
    ENDLESS
    + """
import tensorflow as tf
print("FUNCTION", flush=True)
tf.data.Dataset.range(3).map(lambda value: value + 1)
print("MADE")
"""
)

SUPERVISED = """
import argparse
import tensorflow as tf
tf1 = tf.compat.v1
parser = argparse.ArgumentParser()
for flag in ("--job_name", "--ps_hosts", "--worker_hosts"):
    parser.add_argument(flag)
parser.add_argument("--task_index", type=int)
flags = parser.parse_args()
hosts = {"ps": flags.ps_hosts.split(","), "worker": flags.worker_hosts.split(",")}
cluster = tf.train.ClusterSpec(hosts)
server = tf1.train.Server(cluster, job_name=flags.job_name, task_index=flags.task_index)
if flags.job_name == "ps":
    server.join()
tf1.disable_eager_execution()
with tf1.device(tf1.train.replica_device_setter(cluster=cluster)):
    step = tf1.train.get_or_create_global_step()
    weight = tf1.get_variable("weight", [], initializer=tf1.zeros_initializer())
    train = tf1.train.GradientDescentOptimizer(0.1).minimize((weight - 3) ** 2, global_step=step)
    init = tf1.global_variables_initializer()
supervisor = tf1.train.Supervisor(
    is_chief=flags.task_index == 0, init_op=init, global_step=step, recovery_wait_secs=1
)
with supervisor.managed_session(server.target) as session:
    while session.run(step) < 50:
        session.run(train)
    print("WEIGHT", session.run(weight))
"""


FILES = {
    "endless.py": ENDLESS,
    "reading.py": READING,
    "later.py": LATER,
    "supervised.py": SUPERVISED,
}


@contextlib.contextmanager
def started(folder: Path, *words: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*TFDIST, "run", *map(str, words)],
        cwd=folder,
        env=environment.merged(variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.05)


def kill(folder: Path, kind: str, index: int = 0, by: int = signal.SIGKILL) -> None:
    """Sends a signal to a task of the job in a folder, not to its launcher."""
    place = json.dumps({"index": index, "type": kind})
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").resolve() == folder.resolve():
                command = (entry / "cmdline").read_bytes()
                config = (entry / "environ").read_text()
                if b"tfdist.cli." in command and b"run" not in command and place in config:
                    os.kill(int(entry.name), by)
                    return
    raise AssertionError(f"{kind} {index} does not run")


def configs(workers: int) -> dict[str, str]:
    """The TF_CONFIG of each task of a cluster with a chief and a parameter server."""
    chief, ps, *others = (f"127.0.0.1:{port}" for port in free_ports(workers + 2))
    cluster = {"chief": [chief], "worker": others, "ps": [ps]}
    places = [("chief", 0), *(("worker", i) for i in range(workers)), ("ps", 0)]
    return {
        f"{kind} {index}": json.dumps(
            {"cluster": cluster, "task": {"index": index, "type": kind}}, sort_keys=True
        )
        for kind, index in places
    }


def test_a_worker_of_another_machine_dies_and_is_replaced(folder):
    """Each task has a launcher of its own, as on several machines."""
    with contextlib.ExitStack() as stack:
        jobs = {
            name: stack.enter_context(
                started(
                    folder,
                    *("--mode", "async", "--max-restarts", 1, "--log-dir", f"logs/{name}"),
                    "endless.py",
                    TF_CONFIG=config,
                )
            )
            for name, config in configs(2).items()
        }
        wait_for(folder / "training")
        kill(folder, "worker", 1)
        log = folder / "logs/worker 1/worker-1.log"
        deadline = time.monotonic() + DEADLINE
        while log.read_text().count("worker 1 serves at") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1)
        (folder / "enough").touch()
        said = {name: job.communicate(timeout=DEADLINE)[0] for name, job in jobs.items()}
    assert "DONE" in said["chief 0"], printed(said)
    assert "worker 1 was ended by signal 9 (SIGKILL); starting it again" in said["worker 1"]
    assert {name: job.returncode for name, job in jobs.items()} == dict.fromkeys(jobs, 0), printed(
        said
    )
    assert left_over(folder) == []


def test_servers_of_other_machines_end_when_the_chief_is_killed(folder):
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(started(folder, "endless.py", TF_CONFIG=config))
            for config in configs(1).values()
        ]
        wait_for(folder / "training")
        kill(folder, "chief")
        begin = time.monotonic()
        said = [job.communicate(timeout=DEADLINE)[0] for job in jobs]
        assert time.monotonic() - begin < 15
    assert [job.returncode for job in jobs] == [137, 1, 1]
    assert "chief 0 was ended by signal 9 (SIGKILL)" in said[0]
    for server in said[1:]:
        assert "has gone without a farewell: it was killed, or unplugged" in server
    assert left_over(folder) == []


def test_a_lost_server_starts_the_job_again(folder):
    words = ("--strategy", "parameter_server", "--ps", 1, "--max-restarts", 1, "endless.py")
    with started(folder, *words) as job:
        wait_for(folder / "training")
        kill(folder, "ps")
        said = job.communicate(timeout=DEADLINE)[0]
    assert job.returncode == 0, said
    assert (
        "tfdist: ps 0 was ended by signal 9 (SIGKILL); starting the job again (restart 1 of 1). "
        "The script goes on from its last checkpoint."
    ) in said
    assert "DONE 8" in said
    assert left_over(folder) == []


@pytest.mark.seldom  # As the function below.
def test_a_weight_of_a_stopped_server_is_not_waited_for_without_end(folder):
    words = ("--strategy", "parameter_server", "--ps", 2, "--step-timeout", 8, "reading.py")
    with started(folder, *words) as job:
        wait_for(folder / "training")
        kill(folder, "ps", 1, by=signal.SIGSTOP)
        said = job.communicate(timeout=DEADLINE)[0]
    assert job.returncode == 1, said
    assert "ps 1 has not answered for step_timeout=8 s. It is stopped, or cut off" in said
    assert left_over(folder) == []


def test_a_function_that_goes_to_a_stopped_worker_does_not_wait_without_end(folder):
    words = ("--strategy", "parameter_server", "-n", 2, "--mode", "async", "--step-timeout", 5)
    with started(folder, *words, "later.py") as job:
        wait_for(folder / "training")
        kill(folder, "worker", 1, by=signal.SIGSTOP)
        log = folder / "tfdist-logs/latest/chief-0.log"
        deadline = time.monotonic() + DEADLINE
        while "worker 1 has not ended its step within" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (folder / "enough").touch()
        said = job.communicate(timeout=DEADLINE)[0]
    assert job.returncode == 137, said
    assert "FUNCTION" in said
    assert "MADE" not in said
    assert "worker 1 did not end a step within step_timeout=5 s and has not answered" in said
    assert "Start it again and resume from the last checkpoint" in said
    assert "did not send that signal" not in said
    assert left_over(folder) == []


@pytest.mark.parametrize(
    ("words", "updates"),
    [*seldom((["--task-flags"], "30[0-9]")), ([], "300")],
    ids=["async", "sync"],
)
def test_a_between_graph_program(folder, words, updates):
    """The flags of TensorFlow 1, or TF_CONFIG."""
    own = ["--steps", "300", *([] if words else ["--sync"])]
    script = ROOT / "examples/legacy_between_graph.py"
    done = run(folder, *TFDIST, "run", "--every-task", *words, "-n", 2, "--ps", 1, script, *own)
    assert done.returncode == 0, done.stderr
    other = (folder / "tfdist-logs/latest/worker-1.log").read_text()
    for said in (done.stdout, other):
        assert re.search(r"worker \d trained \d+ steps", said)
        (accuracy,) = re.findall(rf"after {updates} updates: accuracy .* (\d+\.\d+)%", said)
        assert float(accuracy) > 80
    assert left_over(folder) == []


def test_a_program_with_a_supervisor(folder):
    words = ("--every-task", "--task-flags", "--ps", 1, "supervised.py")
    done = run(folder, *TFDIST, "run", *words)
    assert done.returncode == 0, done.stderr
    assert "WEIGHT 2.99" in done.stdout
