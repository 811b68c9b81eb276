"""The README's commands, run as they are written."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import environment

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"^    (tfdist .+)$", README, re.MULTILINE)))
TRAIN = """
import keras, numpy as np
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0)
"""
#: Examples that need not train so long here, since no number of theirs is looked at.
SHORTER = {
    "language_model.py": [("default=80", "default=10")],
    "estimator_wide_and_deep.py": [("default=600", "default=60"), ("default=200", "default=20")],
}
#: Commands of the section on several machines, where TF_CONFIG is set.
IN_A_CLUSTER = ("tfdist doctor", "tfdist run train.py")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name in ("examples", "strategies"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name, changes in SHORTER.items():
        path = tmp_path / "examples" / name
        for long, short in changes:
            assert path.read_text().count(long) == 1
            path.write_text(path.read_text().replace(long, short))
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(folder, command):
    words = shlex.split(command)
    words[0] = str(Path(sys.executable).with_name("tfdist"))
    return subprocess.run(
        words,
        cwd=folder,
        env=environment.snapshot(),
        text=True,
        capture_output=True,
        timeout=240,
    )


def _marks(command):
    """Most jobs of the tour repeat tests of their strategies: here they are planned."""
    often = ("run examples/digits.py", "run --strategy multi_worker -n 2 examples", "--timeline")
    is_job = command.startswith("tfdist run --strategy") or "verify" in command
    rare = is_job and not any(word in command for word in often)
    return [pytest.mark.seldom] if rare else []


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.startswith("tfdist run") and c not in IN_A_CLUSTER]
)
def test_a_job_of_the_tour_is_planned(folder, command):
    done = run(folder, command.replace("tfdist run", "tfdist run --dry-run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(line.endswith(command.split()[-1]) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=_marks(c)) for c in COMMANDS if c not in IN_A_CLUSTER]
)
def test_a_command_of_the_tour_runs(folder, command):
    if command.startswith("tfdist export"):
        save = 'model.save("model.keras")'
        subprocess.run([sys.executable, "-c", TRAIN + save], cwd=folder, check=True, timeout=100)
    done = run(folder, command)
    assert done.returncode == 0, done.stdout + done.stderr
    if "run" in command.split() and "digits.py" in command:
        (accuracy,) = re.findall(r"validation accuracy (\d+\.\d+)%", done.stdout)
        # Gradients that are late by chance cost some accuracy in so short a training.
        assert float(accuracy) >= (90 if "stale" in command else 97)


def test_the_tf_config_of_the_tour_is_well_formed():
    from tfdist.cluster.tf_config import check_tf_config
    from tfdist.config.strategy_spec import spec_of

    (text,) = re.findall(r"^    export TF_CONFIG='(.+)'$", README, re.MULTILINE)
    findings = check_tf_config(text, use=spec_of("multi_worker").use)
    assert [f for f in findings if f.severity == "error"] == []


def test_every_strategy_is_in_the_readme():
    from tfdist.config.strategy_config import STRATEGIES

    for name in STRATEGIES:
        assert f"| `{name}` |" in README
