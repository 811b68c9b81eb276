"""Programs in the form of TensorFlow's tutorials, which make a strategy by themselves.

They run under `tfdist run` as they are, on the strategies that can take the place of theirs, and
train what one process trains.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import environment

PROGRAMS = Path(__file__).with_name("own_strategies")
TFDIST = [str(Path(sys.executable).with_name("tfdist"))]
DEADLINE = 240


def run(folder, *arguments):
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [*TFDIST, "run", *map(str, arguments)],
        cwd=folder,
        env=environment.merged({"TF_CONFIG": None}),
        text=True,
        capture_output=True,
        timeout=DEADLINE,
    )


def results(text):
    """The numbers that a program has printed."""
    return [json.loads(line) for line in re.findall(r"^RESULT (.*)$", text, re.MULTILINE)]


def trained(folder, program, *options, batch=None):
    """The numbers of each of the processes, of which the chief's come first."""
    given = [] if batch is None else [batch]
    done = run(folder, *options, PROGRAMS / f"{program}.py", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(done.stdout)
    others = sorted((folder / "tfdist-logs/latest").glob("worker-[1-9].log"))
    return done, [*found, *(row for log in others for row in results(log.read_text()))]


def seldom(*values):
    return pytest.param(*values, marks=pytest.mark.seldom)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The numbers of a program on one process, which is run once."""

    @functools.cache
    def of(program):
        _, (row,) = trained(tmp_path_factory.mktemp(program), program, batch=16)
        return row

    return of


@pytest.mark.parametrize(
    ("program", "strategy"),
    [
        pytest.param("mirrored_fit", "mirrored", marks=pytest.mark.core),
        seldom("mirrored_fit", "multi_worker"),
        seldom("mirrored_fit", "horovod"),
        seldom("mirrored_loop", "mirrored"),
        seldom("mirrored_loop", "horovod"),
        seldom("mirrored_loop", "multi_worker"),
    ],
)
def test_a_program_for_several_devices(tmp_path, alone, program, strategy):
    expected = alone(program)
    done, rows = trained(tmp_path, program, "--strategy", strategy, "-n", 2, batch=8)
    said = f"tf.distribute.MirroredStrategy of the program is the active strategy {strategy!r}"
    assert said in done.stderr
    assert "AutoGraph could not" not in done.stderr
    assert len(rows) == (1 if strategy == "mirrored" else 2)
    for row in rows:
        assert row == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("program", "several"),
    [
        ("multi_worker_fit", "multi_worker"),
        seldom("multi_worker_fit", "horovod"),
        seldom("multi_worker_loop", "horovod"),
        seldom("multi_worker_loop", "multi_worker"),
    ],
)
def test_a_program_for_several_workers(tmp_path, program, several):
    rows = {}
    for strategy in ("mirrored", several):
        done, rows[strategy] = trained(
            tmp_path / strategy, program, "--strategy", strategy, "-n", 2, batch=8
        )
        assert "MultiWorkerMirroredStrategy of the program is the active strategy" in done.stderr
        chief, *others = re.findall(r"^CHIEF (\w+)", done.stdout, re.MULTILINE)
        assert (chief, others) == ("True", [])
        if strategy != "mirrored":
            other = (tmp_path / strategy / "tfdist-logs/latest/worker-1.log").read_text()
            assert "CHIEF False" in other
    (expected,) = rows["mirrored"]
    assert len(rows[several]) == 2
    for row in rows[several]:
        assert row == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("server_fit", marks=pytest.mark.core),
        "server_loop",
        seldom("server_in_process"),
    ],
)
def test_a_program_for_parameter_servers(tmp_path, program):
    done, (row,) = trained(tmp_path, program, "--strategy", "parameter_server", "-n", 2)
    assert "ParameterServerStrategy of the program is the active strategy" in done.stderr
    assert "TensorFlow connects to worker 0 at 127.0.0.1:" in done.stderr
    assert ", then traces the first step" in done.stderr
    assert all(number >= 0 for number in row)


@pytest.mark.parametrize(
    ("program", "strategy", "asked"),
    [
        seldom("multi_worker_fit", "parameter_server", "MultiWorkerMirroredStrategy"),
        ("server_fit", "multi_worker", "Server"),
        seldom("server_loop", "mirrored", "ParameterServerStrategy"),
    ],
)
def test_a_program_of_another_kind_is_told_which_strategy_it_needs(
    tmp_path, program, strategy, asked
):
    done = run(tmp_path, "--strategy", strategy, "-n", 2, PROGRAMS / f"{program}.py", 8)
    assert done.returncode == 2
    assert f"{asked} of the program conflicts with the active strategy {strategy!r}" in done.stderr


EARLY = """
import json
import keras
import numpy as np
import tensorflow as tf

tf.random.set_seed(3)
one = tf.constant(1.0) + 1
data = tf.data.Dataset.from_tensor_slices((np.eye(8, dtype="float32"), np.arange(8.0))).batch(8)
first = next(iter(data))
assert len(tf.config.list_logical_devices("CPU")) >= 1

import tfdist

strategy = tfdist.strategy(NAME)
with strategy.scope():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
print("RESULT", json.dumps(model.fit(data, epochs=2, verbose=0).history["loss"]))
"""


@pytest.mark.parametrize(
    "options",
    [
        seldom(("single",)),
        seldom(("mirrored", "-n", 2)),
        ("multi_worker", "-n", 2),
        seldom(("horovod", "-n", 2)),
        seldom(("parameter_server", "-n", 1)),
        seldom(("pipeline", "--stages", 2)),
    ],
    ids=lambda options: options[0],
)
def test_tensorflow_may_be_used_before_the_program_makes_its_strategy(tmp_path, options):
    (tmp_path / "early.py").write_text(EARLY.replace("NAME", repr(options[0])))
    done = run(tmp_path, "--strategy", *options, "early.py")
    assert done.returncode == 0, done.stderr
    assert len(results(done.stdout)[0]) == 2
