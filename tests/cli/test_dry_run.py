"""The layouts that `tfdist run --dry-run` prints: of weights and of what the optimizer keeps."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import environment

TRAIN = """
import keras, numpy as np
import tfdist

tfdist.strategy()
layers = [keras.layers.Dense(1024, "relu"), keras.layers.Dense(32), keras.layers.Dense(3)]
model = keras.Sequential(layers)
model.compile("adam", "mse")
print("before training")
x = np.ones((64, 32), "float32")
model.fit(x, x[:, :3], 16)
open("trained", "w").close()
"""


def dry_run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tfdist", "run", "--dry-run", *words, "train.py"],
        env=environment.merged({"TF_CONFIG": None, "CUDA_VISIBLE_DEVICES": "-1"}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


TWO = """
import keras
import numpy as np

made = [
    keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="dense")], name="net")
    for _ in range(2)
]
made[0].compile("adam", "mse")
made[0].fit(np.zeros((8, 8)), np.zeros((8, 4)), verbose=0)
"""


GAN = """
import keras
import numpy as np
import tensorflow as tf


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.artist = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4096)])
        self.judge = keras.Sequential([keras.Input((4096,)), keras.layers.Dense(16)])

    def compile(self, artist, judge):
        super().compile(jit_compile=False)
        self.of_artist, self.of_judge = artist, judge

    def train_step(self, noise):
        for part, optimizer in ((self.judge, self.of_judge), (self.artist, self.of_artist)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.judge(self.artist(noise)))
            weights = part.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


gan = Gan()
gan.compile(keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9))
gan.fit(np.zeros((8, 8), "float32"), verbose=0)
open("trained", "w").close()
"""


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)


@pytest.mark.parametrize(
    ("flags", "layouts", "kept"),
    [
        ("-n 4 --mesh data=2,model=2", ["- model", "model", "model -", "-"], 133_644),
        (
            "-n 4 --mesh data=2,model=2 --zero 3",
            ["data model", "model", "model+data -", "-"],
            68_108,
        ),
        ("-n 2 --zero 3", ["data -", "-", "data -", "-"], 135_692),
    ],
)
def test_every_weight_with_its_layout_and_bytes(flags: str, layouts: list[str], kept: int) -> None:
    result = dry_run("-s", "multi_worker", *flags.split())
    assert result.returncode == 0, result.stderr
    assert not Path("trained").exists()
    assert "before training" in result.stderr
    assert "before training" not in result.stdout
    rows = re.findall(r"^#   (sequential/\S+) +\(.+?\) +(.+?) +([\d,]+)$", result.stdout, re.M)
    assert [row[0].split("/")[1:] for row in rows][:2] == [["dense", "kernel"], ["dense", "bias"]]
    assert len(rows) == 6
    assert [row[1] for row in rows][:4] == layouts
    assert sum(int(row[2].replace(",", "")) for row in rows) == kept
    own = f"keeps {kept:,} bytes of 6 weights, and {2 * kept + 12:,} of the optimizer's variables"
    assert own in result.stdout
    pasted = shlex.split(result.stdout.replace("\\\n", ""), comments=True)
    assert pasted[-1] == "train.py"


def test_weights_of_two_models_of_one_name_are_both_shown() -> None:
    Path("train.py").write_text(TWO)
    result = dry_run("-s", "multi_worker", "-n", "2", "--zero", "3")
    assert "bytes of 4 weights" in result.stdout
    assert len(re.findall(r"^#   net/dense/kernel ", result.stdout, re.M)) == 2


def test_all_optimizers_of_a_step_are_counted() -> None:
    Path("train.py").write_text(GAN)
    result = dry_run("-s", "multi_worker", "-n", "2", "--zero", "3", "--json")
    assert not Path("trained").exists()
    layouts = json.loads(result.stdout)["layouts"]
    sizes = [each["bytes"] for each in layouts["weights"]]
    whole = [8 * 4096 * 4 // 2, 4096 * 4, 4096 * 16 * 4 // 2, 16 * 4]
    assert sizes == whole
    # Adam's two moments, SGD's one; and the iterations and the learning rate of each.
    assert layouts["optimizer"] == 2 * sum(whole[:2]) + sum(whole[2:]) + 2 * 12


def test_zero_divides_what_the_optimizer_keeps() -> None:
    result = dry_run("-s", "multi_worker", "-n", "2", "--zero", "2", "--json")
    layouts = json.loads(result.stdout)["layouts"]
    whole = sum(each["bytes"] for each in layouts["weights"])
    assert {each["layout"] for each in layouts["weights"]} == {"-", "- -"}
    assert whole == 4 * (32 * 1024 + 1024 + 1024 * 32 + 32 + 32 * 3 + 3)
    assert layouts["optimizer"] == whole + 12 + 12  # Half of Adam's two; of 3 numbers, all.


def test_rules_that_match_nothing_are_an_error() -> None:
    flags = ("-s", "multi_worker", "-n", "2", "--mesh", "model=2")
    result = dry_run(*flags, "--layouts", "ffn=- model")
    assert result.returncode == 2
    assert "The layout 'ffn=- model' matches none of the weights" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_program_that_trains_nothing_is_told() -> None:
    Path("train.py").write_text("print('nothing')")
    result = dry_run("-s", "multi_worker", "-n", "2", "--zero", "3")
    assert result.returncode == 0
    assert "made no weights" in result.stderr


def test_a_mesh_of_data_alone_divides_no_weight() -> None:
    result = dry_run("-s", "multi_worker", "-n", "2", "--mesh", "data=2")
    assert result.returncode == 0
    assert "weights" not in result.stdout + result.stderr


def test_a_mesh_of_another_size_than_the_job_is_an_error() -> None:
    Path("mesh.toml").write_text('strategy = "multi_worker"\n[mesh]\nmodel = 2\n')
    result = dry_run("-s", "mesh.toml")
    assert result.returncode == 2
    assert "conflicts with a job of 1 processes: its axes make 2" in result.stderr
    assert not Path("trained").exists()
