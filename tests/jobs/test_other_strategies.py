"""A strategy of another package: one module, and one line in its entry points.

It is a target of the contract suite too (tests/harness/targets.py).
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

from tfdist import environment

TOY = pathlib.Path(__file__).with_name("toy") / "toy_strategy.py"
SCRIPT = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.05), "mse")
done = model.fit(x, x[:, :1] * x[:, 1:2], batch_size=8, epochs=3, shuffle=False, verbose=0)
print("replicas", tf.distribute.get_strategy().num_replicas_in_sync)
print("loss", *(f"{loss:.5f}" for loss in done.history["loss"]))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory that looks like an installed distribution with a strategy."""
    folder = tmp_path_factory.mktemp("toy")
    shutil.copy(TOY, folder)
    (folder / "train.py").write_text(SCRIPT)
    info = folder / "toy_strategy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-strategy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tfdist.strategies]\ntoy = toy_strategy:SPEC\n")
    return folder


def run(package: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    given = environment.snapshot().get("PYTHONPATH", "")
    environ = {"PYTHONPATH": f"{package}:{given}", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=package,
        env=environment.merged(environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def loss_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("loss"))


def test_it_stands_in_the_help_and_in_the_plan(package):
    assert "toy" in run(package, "-m", "tfdist.cli.main", "run", "--help").stdout
    told = run(package, "-m", "tfdist.cli.main", "run", "--help", "toy").stdout
    assert "--wheels" in told
    assert "How many wheels it has." in told
    plan = run(
        package, "-m", "tfdist.cli.main", "run", "--strategy=toy", "-n2", "--dry-run", "train.py"
    )
    assert plan.returncode == 0, plan.stderr
    assert '"strategy": "toy"' in plan.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ps", "2"), "--ps 2 conflicts with --strategy toy, which has no parameter servers."),
        (("--mode", "stale"), "--strategy toy, which has sync, local."),
        (("--wheels", "0"), "--wheels 0 is not a whole number of 1 or more."),
        (("--strategy=single", "--wheels=3"), "--wheels 3 conflicts with --strategy single"),
    ],
)
def test_its_options_are_checked(package, options, words):
    command = ("-m", "tfdist.cli.main", "run", "--strategy=toy", *options, "train.py")
    done = run(package, *command)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())


@pytest.mark.seldom  # The contract suite has such a strategy: `toy`.
def test_it_trains_what_one_process_trains(package):
    alone = run(package, "train.py")
    command = ("-m", "tfdist.cli.main", "run", "--strategy=toy", "-n2", "--wheels=3", "train.py")
    several = run(package, *command)
    assert "replicas 2" in several.stdout
    assert "toy sync on 3 wheels" in several.stderr
    assert loss_of(several) == loss_of(alone)
    command = ("-m", "tfdist.cli.main", "verify", "--strategy=toy", "-n2", "--steps=3", "train.py")
    verified = run(package, *command)
    assert verified.returncode == 0, verified.stdout + verified.stderr
