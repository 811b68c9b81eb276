"""A model that is larger than a device: TensorFlow's allocator is given less than it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import environment

TRAIN = """
import keras, numpy as np, tensorflow as tf

keras.utils.set_random_seed(3)
layers = [keras.layers.Dense(1024, "relu") for _ in range(6)]
model = keras.Sequential([keras.Input((1024,)), *layers])
model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
x = np.random.default_rng(0).normal(size=(128, 1024)).astype("float32")
model.fit(x[:32], x[:32], 32, verbose=0)
tf.config.experimental.reset_memory_stats("CPU:0")
loss = model.fit(x, x, 32, verbose=0).history["loss"][0]
peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
sums = [float(np.square(np.asarray(weight)).sum()) for weight in model.weights]
print("trained", peak, loss, *sums)
"""

SPEAK = """
import keras, numpy as np, tensorflow as tf
import tfdist

keras.utils.set_random_seed(3)
ids = keras.Input((64,), dtype="int32")
hidden = keras.layers.Dense(64, "relu")(keras.layers.Embedding(32768, 64)(ids))
model = keras.Model(ids, keras.layers.Dense(32768)(hidden))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, jit_compile=False)
x = np.random.default_rng(0).integers(0, 32768, (32, 64))
model.fit(x[:8], x[:8], 8, verbose=0)
tf.config.experimental.reset_memory_stats("CPU:0")
losses = model.fit(x, np.roll(x, 1, 1), 8, 2, shuffle=False, verbose=0).history["loss"]
peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
if tfdist.strategy().is_chief:
    print("trained", peak, *losses)
"""

#: MiB; the weights, Adam's state and one gradient of each take 96.
LIMIT = "64"


def _run(folder: Path, flags: str, limit: str | None) -> subprocess.CompletedProcess[str]:
    """Runs `train.py`; TensorFlow's allocator counts its bytes, and has no more than a limit."""
    limits = {"TF_CPU_ALLOCATOR_USE_BFC": "true"}
    if limit is not None:
        limits["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = limit
    return subprocess.run(
        [sys.executable, "-m", "tfdist", "run", *flags.split(), "train.py"],
        cwd=folder,
        env=environment.merged(limits),
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )


def _numbers(text: str) -> list[float]:
    (line,) = re.findall(r"^trained (.+)$", text, re.MULTILINE)
    return [float(word) for word in line.split()]


@pytest.mark.seldom  # benchmarks/sharding.py measures it, too.
def test_a_divided_model_trains_where_a_whole_one_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    alone, *expected = _numbers(_run(tmp_path, "--strategy single", None).stdout)
    for flags in ("--strategy single", "--strategy multi_worker -n 2"):
        done = _run(tmp_path, flags, LIMIT)
        assert done.returncode != 0
        assert "OOM when allocating tensor" in done.stdout + done.stderr
    # Weights and Adam's state, divided; and about five weights and gradients of single layers.
    for flags, most in (("-n 4 --zero 3", 0.45), ("-n 2 --mesh model=2", 0.65)):
        done = _run(tmp_path, f"--strategy multi_worker {flags}", LIMIT)
        assert done.returncode == 0, done.stdout + done.stderr
        peak, *numbers = _numbers(done.stdout)
        assert peak < most * alone
        assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.seldom  # benchmarks/sharding.py measures it, too.
def test_logits_in_parts_are_never_whole(tmp_path: Path) -> None:
    """Their loss takes 0.45 of the memory of one process at most, on four."""
    (tmp_path / "train.py").write_text(SPEAK)
    alone, *expected = _numbers(_run(tmp_path, "--strategy single", None).stdout)
    flags = "--strategy multi_worker -n 4 --mesh model=4"
    peak, *losses = _numbers(_run(tmp_path, flags, None).stdout)
    assert peak < 0.45 * alone
    assert losses == pytest.approx(expected, rel=1e-5)
