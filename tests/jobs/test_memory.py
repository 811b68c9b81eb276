"""A model that is larger than a device: TensorFlow's allocator is given less than it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import environment

TRAIN = """
import keras, numpy as np

keras.utils.set_random_seed(3)
layers = [keras.layers.Dense(1024, "relu") for _ in range(6)]
model = keras.Sequential([keras.Input((1024,)), *layers])
model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
x = np.random.default_rng(0).normal(size=(128, 1024)).astype("float32")
loss = model.fit(x, x, 32, verbose=0).history["loss"][0]
sums = [float(np.square(np.asarray(weight)).sum()) for weight in model.weights]
print("trained", loss, *sums)
"""

#: MiB; the weights, Adam's state and one gradient of each take 96.
LIMIT = "64"


def _run(folder: Path, flags: str, limit: str | None) -> subprocess.CompletedProcess[str]:
    limits = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": limit}
    return subprocess.run(
        [sys.executable, "-m", "tfdist", "run", *flags.split(), "train.py"],
        cwd=folder,
        env=environment.merged(limits if limit else {}),
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )


def _numbers(text: str) -> list[float]:
    (line,) = re.findall(r"^trained (.+)$", text, re.MULTILINE)
    return [float(word) for word in line.split()]


def test_a_divided_model_trains_where_a_whole_one_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    expected = _numbers(_run(tmp_path, "--strategy single", None).stdout)
    for flags in ("--strategy single", "--strategy multi_worker -n 2"):
        done = _run(tmp_path, flags, LIMIT)
        assert done.returncode != 0
        assert "OOM when allocating tensor" in done.stdout + done.stderr
    for flags in ("-n 4 --zero 3", "-n 2 --mesh model=2"):
        done = _run(tmp_path, f"--strategy multi_worker {flags}", LIMIT)
        assert done.returncode == 0, done.stdout + done.stderr
        assert _numbers(done.stdout) == pytest.approx(expected, rel=1e-5, abs=1e-5)
