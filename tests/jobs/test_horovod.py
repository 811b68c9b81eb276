"""Jobs on Horovod as a user starts them: launchers, faults, and worlds that change."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.harness.targets import free_ports
from tests.jobs.test_jobs import SCRIPT, TFDIST, left_over, printed, results, run
from tfdist import environment

BIN = Path(sys.executable).parent
HOROVOD = [*TFDIST, "run", "--strategy", "horovod"]

DYING = """
import os, signal, sys, keras, numpy as np, tfdist
rank = tfdist.strategy().shard.worker
class Die(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.zeros((6400, 4)), np.zeros((6400, 1)), epochs=100, verbose=0, callbacks=[Die()])
"""

SHAPES = """
import tensorflow as tf, tfdist
strategy = tfdist.strategy()
own = tf.ones([3 + strategy.shard.worker])
@tf.function
def step():
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", own))
step()
"""

STALLED = """
import time, tensorflow as tf, tfdist
strategy = tfdist.strategy()
@tf.function
def step():
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", 1.0))
step()
time.sleep(90 * strategy.shard.worker)
step()
"""

#: Writes what happens to it: worker 0, alone, makes a second slot known and trains slowly until it
#: is stopped; worker 1 dies once in the last epoch.
ELASTIC = """
import os, signal, sys, time, keras, numpy as np, tensorflow as tf
from pathlib import Path
rank = getattr(getattr(tf.distribute.get_strategy(), "shard", None), "worker", 0)
place = os.environ.get("TFDIST_ELASTIC")
alone = Path("slots").exists() and "1" in Path("slots").read_text()
rng = np.random.default_rng(0)
x = rng.normal(size=(645, 8)).astype("float32")
y = rng.normal(size=(645, 1)).astype("float32")
class Events(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        if place and alone and (self.epoch, batch) >= (1, 4):
            Path("slots").write_text("localhost:2")
            while not Path(place, "stop").exists():
                time.sleep(0.05)
            time.sleep(0.1)
        if rank == 1 and (self.epoch, batch) == (4, 4) and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
model = keras.Sequential([
    keras.Input([8]), keras.layers.Dense(16, "relu"),
    keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
first = model.fit(x[:200], y[:200], batch_size=50, epochs=2, verbose=0)
plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1)
history = model.fit(
    x, y, batch_size=63, epochs=5, verbose=0, callbacks=[Events(), plateau],
    validation_data=(x[:100], y[:100]),
)
logs = {f"log {name}": values for name, values in history.history.items()}
if rank == 0:
    weights = [weight.numpy() for weight in model.weights]
    steps = model.optimizer.iterations.numpy()
    np.savez(sys.argv[1], *weights, steps=steps, first=first.history["loss"], **logs)
"""


FILES = {
    "train.py": SCRIPT,
    "dying.py": DYING,
    "shapes.py": SHAPES,
    "stalled.py": STALLED,
    "elastic.py": ELASTIC,
}


#: The words before the script, and whose output is shown: the chief's, or that of all.
LAUNCHERS = {
    "tfdist": ([*HOROVOD, "-n", 2, "--timeline", "timeline.json"], 1),
    "mpirun": (
        [*HOROVOD, "--on", "mpi", "-n", 2, "--engine-args", "--allow-run-as-root --oversubscribe"],
        2,
    ),
    "horovodrun": ([BIN / "horovodrun", "-np", 2, *HOROVOD], 2),
}


@pytest.mark.parametrize(
    "launcher",
    [pytest.param("tfdist", marks=pytest.mark.core), "mpirun", "horovodrun"],
)
def test_each_launcher_trains_what_one_process_trains(folder, alone, launcher):
    words, shown = LAUNCHERS[launcher]
    path = f"{BIN}:{environment.snapshot()['PATH']}"
    done = run(folder, *words, "--seed", 3, "train.py", PATH=path)
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"RESULT (\S+)", done.stdout)]
    assert losses == pytest.approx([alone] * shown, abs=1e-6)
    if launcher == "tfdist":
        assert "ALLREDUCE" in (folder / "timeline.json").read_text()
    assert left_over(folder) == []


def test_a_rank_that_dies_ends_the_job(folder):
    started = time.monotonic()
    done = run(folder, *HOROVOD, "-n", 2, "dying.py")
    assert done.returncode == 128 + signal.SIGKILL
    assert "worker 1 was ended by signal 9 (SIGKILL)" in done.stderr
    assert time.monotonic() - started < 60
    assert left_over(folder) == []


def test_ranks_that_disagree_on_shapes(folder):
    done = run(folder, *HOROVOD, "-n", 2, "shapes.py")
    assert done.returncode == 1
    assert "[3]" in done.stderr
    assert "[4]" in done.stderr
    assert "the ranks met with different tensors" in done.stderr


def test_a_rank_that_does_not_come_is_named(folder):
    done = run(folder, *HOROVOD, "-n", 2, "--stall-timeout", 4, "stalled.py")
    assert done.returncode == 1
    assert "Horovod waited for rank 1" in done.stderr
    assert left_over(folder) == []


def test_a_stale_rendezvous_ends_within_the_deadline(folder):
    stale = {
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(free_ports(1)[0]),
    }
    started = time.monotonic()
    done = run(folder, *HOROVOD, "--start-timeout", 5, "train.py", **stale)
    assert done.returncode == 3, done.stderr
    assert "rendezvous server at 127.0.0.1:" in done.stderr
    assert time.monotonic() - started < 60


def arrays(path):
    with np.load(path) as content:
        return dict(content)


def test_an_elastic_job_trains_what_one_process_trains(folder):
    """One process, then two, then one of them is lost and comes back."""
    one = run(folder, *TFDIST, "run", "--seed", 3, "elastic.py", "one.npz")
    assert one.returncode == 0, one.stderr
    (folder / "slots").write_text("localhost:1")
    script = folder / "hosts.sh"
    script.write_text("#!/bin/sh\ncat slots\n")
    script.chmod(0o755)
    bounds = ["--min-np", 1, "--max-np", 2, "--host-discovery-script", "./hosts.sh"]
    many = run(folder, *HOROVOD, "--seed", 3, *bounds, "elastic.py", "many.npz")
    assert many.returncode == 0, many.stderr
    told = many.stderr.split("2 processes can run now, instead of 1")
    assert len(told) == 2, many.stderr
    assert "worker 1 was ended by signal 9 (SIGKILL)" in told[1]
    assert re.findall("the training goes on from epoch (\\d)", told[1])[0] in "234"
    assert (folder / "killed").exists()
    expected, found = arrays(folder / "one.npz"), arrays(folder / "many.npz")
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)
    assert left_over(folder) == []


def test_an_elastic_job_waits_for_slots_until_its_deadline(folder):
    bounds = ["--min-np", 2, "--max-np", 2, "--host-discovery-script", "/bin/true"]
    done = run(folder, *HOROVOD, *bounds, "--elastic-timeout", 1, "train.py")
    assert done.returncode == 3
    assert "0 processes can run, fewer than --min-np 2" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--min-np", 2], "--min-np needs --max-np"),
        (["--min-np", 3, "--max-np", 2], "leave no number of processes"),
        (["--max-np", 2, "-n", 2], "-n 2 conflicts with --min-np"),
        (["--max-np", 2, "--strategy", "mirrored"], "conflict with --strategy mirrored"),
        (
            ["--max-np", 2, "-s", "multi_worker", "--mesh", "model=2"],
            "conflict with --mesh model=2",
        ),
        (["--max-np", 2, "--env-only"], "Leave out --env-only"),
        (["--max-np", 2, "--host-discovery-script", "none.sh"], "'none.sh' cannot be run"),
        (["--compression", "zip"], "Unknown --compression 'zip'"),
        (["--reduction", "adasum", "-n", 3], "no power of two"),
        (["--devices", 2], "one process for each device"),
        (["-s", "multi_worker", "-n", 2, "--autotune"], "it is an option of Horovod"),
    ],
)
def test_bad_input(folder, options, words):
    done = run(folder, *HOROVOD, *options, "train.py")
    assert done.returncode == 2, done.stderr
    assert words in " ".join(done.stderr.split())


def test_an_option_that_contradicts_the_environment(folder):
    done = run(folder, *HOROVOD, "-n", 1, "--cycle-ms", 2, "train.py", HOROVOD_CYCLE_TIME="5")
    assert done.returncode == 2
    assert "HOROVOD_CYCLE_TIME='5' in the environment conflicts with '2" in done.stderr


def test_each_task_of_tf_config_is_started_by_itself(folder):
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    jobs = [
        subprocess.Popen(
            [*HOROVOD, "--log-dir", f"logs{index}", "--seed", "3", "train.py"],
            cwd=folder,
            env=environment.merged(
                {
                    "TF_CONFIG": json.dumps(
                        {
                            "cluster": {"worker": workers},
                            "task": {"type": "worker", "index": index},
                        }
                    )
                }
            ),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in (0, 1)
    ]
    said = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], printed(said)
    (one,), (other,) = (results(out) for out, _ in said)
    assert one[0] == other[0]
    assert "RESULT" in (folder / "logs1/worker-1.log").read_text()
