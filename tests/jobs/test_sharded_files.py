"""A process that dies under ZeRO and a mesh, and the training that goes on on half as many."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdist import environment

TRAIN = """
import os, pathlib, signal, time
import keras, numpy as np, tensorflow as tf

keras.utils.set_random_seed(3)
layers = [keras.layers.Dense(160, "relu"), keras.layers.Dense(64)]
model = keras.Sequential([keras.Input((64,)), *layers])
model.compile(keras.optimizers.Adam(1e-3), "mse")
x = np.random.default_rng(0).normal(size=(77, 64)).astype("float32")
world = tf.distribute.get_strategy().world
last = world.workers > 1 and world.worker == world.workers - 1
died = pathlib.Path("died")


def die(epoch, logs):
    if epoch == 1 and last and not died.exists():
        died.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


backup = keras.callbacks.BackupAndRestore("backup")
ending = keras.callbacks.LambdaCallback(on_epoch_begin=die)
history = model.fit(x, x, 32, 3, shuffle=False, verbose=0, callbacks=[backup, ending]).history
sums = [float(np.square(np.asarray(v)).sum()) for v in [*model.weights, *model.optimizer.variables]]
print("epochs", len(history["loss"]))
print("trained", *sums)
"""

READ = """
import sys, time
import keras, numpy as np, tensorflow as tf
from tfdist.sharding import variables

variables.READ_SECONDS = 3.0
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(320)])
if tf.distribute.get_strategy().world.worker == 0:
    model.get_weights()
time.sleep(600)
"""


def _run(folder: Path, flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfdist", "run", *flags.split(), "train.py"]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment.merged({}),
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )


def _numbers(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = re.findall(r"^trained (.+)$", done.stdout, re.MULTILINE)
    return [float(word) for word in line.split()]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("-n 4 --mesh data=2,model=2 --zero 3", "-n 2 --mesh model=2"),
        # The same code with one axis, and the job starts itself again.
        pytest.param("-n 2 --zero 3 --max-restarts 1", None, marks=pytest.mark.seldom),
    ],
)
def test_a_killed_process_is_named_and_half_of_them_go_on(
    tmp_path: Path, first: str, then: str | None
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    job = "--strategy multi_worker --checkpoints sharded --seed 5"
    expected = _numbers(_run(tmp_path, "--strategy single --seed 5"))
    done = _run(tmp_path, f"{job} {first}")
    seconds = time.time() - float((tmp_path / "died").read_text())
    if then is not None:
        assert done.returncode != 0
        assert "worker 3 was ended by signal 9 (SIGKILL)" in done.stderr
        assert seconds < 60
        assert (tmp_path / "backup" / "latest.weights.h5" / "index.json").exists()
        done = _run(tmp_path, f"{job} {then}")
    assert "epochs 2" in done.stdout
    assert _numbers(done) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.seldom  # tests/keras/test_zero.py names such a read.
def test_a_process_that_reads_weights_alone_gives_up(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(READ)
    done = _run(tmp_path, "--strategy multi_worker -n 2 --zero 3 --grace 2")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "worker 0 has waited for 3.0 s at \"reading 'sequential/dense/kernel', which is" in said
