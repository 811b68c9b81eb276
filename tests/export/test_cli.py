"""`tfdist export`: its words, as a process once, and the examples of the documentation."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from typer.testing import CliRunner

import tfdist
from tests.export import models
from tfdist import environment
from tfdist.cli.main import app

DOCS = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
COMMANDS = re.findall(r"^ {4}(tfdist export .+)$|`(tfdist export .+?)`", DOCS, re.MULTILINE)
COMMANDS = [one or other for one, other in COMMANDS if one or other != "tfdist export"]

TRAIN = """
import keras
def make_model():
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(20, 4)(tokens)
    return keras.Model(tokens, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x)))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with all that the documentation speaks of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    scope: dict = {}
    exec(TRAIN, scope)
    model = scope["make_model"]()
    model.save("model.keras")
    model.save_weights("last.weights.h5")
    tf.train.Checkpoint(model=model).save("checkpoints/ckpt")
    model.export("saved", verbose=False)
    random = np.random.default_rng(2)
    np.savez("test.npz", x=random.integers(0, 20, (200, 9)), y=random.integers(0, 3, 200))
    return tmp_path


def run(*arguments):
    environ = {"COLUMNS": "150", "NO_COLOR": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return CliRunner().invoke(app, ["export", *arguments], env=environ)


def test_every_command_of_the_documentation_runs(folder):
    assert len(COMMANDS) >= 9
    for command in ("tfdist export model.keras model.onnx", *COMMANDS):
        done = run(*shlex.split(command)[2:])
        assert done.exit_code == 0, (command, done.output, done.stderr)
        assert re.search("agrees" if "--check" in command else "written", done.stdout), command


def test_the_python_of_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(1)
    np.random.seed(1)
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL):
        exec(block, scope)
    assert scope["score"].examples == 200


def test_the_documentation_names_every_option():
    options = {name for command in app.registered_commands for name in _options(command)}
    for name in sorted(options - {"--format", "--opset"}):
        assert name in DOCS, name


def _options(command):
    if command.callback.__name__ != "export":
        return []
    helped = CliRunner().invoke(app, ["export", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    return [name for name in re.findall(r"(--[a-z-]+)", helped.stdout) if name != "--help"]


def test_the_help_teaches():
    helped = CliRunner().invoke(app, ["export", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert "tfdist export model.keras model.onnx" in helped.stdout
    assert "Exit status" in helped.stdout


def test_tables(folder):
    done = run("model.keras", "m.onnx", "--precision", "int8", "--data", "test.npz")
    assert re.search(r"output +│ accuracy +│ +\d+\.\d\d% │ +\d+\.\d\d% │", done.stdout)
    assert "│     200 │" in done.stdout.replace("│      200 │", "│     200 │")
    assert "tried: batch 1, length 7, batch 3, length 12" in done.stdout
    assert re.search(r"written m\.onnx \(ONNX, opset 18, int8, \d+\.\d kB\)", done.stdout)


def test_a_difference_is_shown_and_fails(folder):
    model = keras.models.load_model("model.keras")
    tfdist.export(model, "m.onnx")
    model.layers[-1].set_weights([w + 1 for w in model.layers[-1].get_weights()])
    model.save("other.keras")
    done = run("--check", "other.keras", "m.onnx")
    assert done.exit_code == 1
    assert f"The first layer that differs is '{model.layers[-1].name}'" in done.stdout
    assert run("--check", "other.keras", "m.onnx", "--format", "onnx").exit_code == 2


def test_mistakes_of_the_command_line(folder):
    models.with_python().save("own.keras")
    for arguments, status, message in (
        (("missing.keras", "m.onnx"), 2, "'missing.keras' does not exist"),
        (("model.keras", "no/m.onnx"), 2, "the directory 'no' does not exist"),
        (("model.keras", "m.onnx", "--import", "nowhere"), 2, "'--import nowhere' cannot be"),
        (("own.keras", "m.onnx"), 1, "EagerPyFunc of the layer 'own'"),
    ):
        done = run(*arguments)
        assert done.exit_code == status, done.output
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not os.path.exists("m.onnx")


def test_as_a_process_quietly(folder):
    done = subprocess.run(
        [str(Path(sys.executable).with_name("tfdist")), "export", "model.keras", "m.onnx"],
        env=environment.merged({"TF_CPP_MIN_LOG_LEVEL": None}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "written m.onnx" in done.stdout
    assert done.stderr == ""
