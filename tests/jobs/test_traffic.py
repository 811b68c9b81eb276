"""The bytes of a step at the network device: each process has a network namespace of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pods import missing, network
from tests.harness.tiers import seldom
from tests.jobs.test_jobs import DEADLINE, TFDIST, printed
from tfdist import environment

PROCESSES, WIDTH, LAYERS, STEPS = 3, 768, 6, 6

#: Keras's `fit`, and what the device has sent before the steps that are counted and after them.
SCRIPT = f"""
import sys
import keras, numpy as np

def sent():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())

class Count(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.before = sent()
    def on_epoch_end(self, epoch, logs=None):
        self.bytes = (sent() - self.before) / {STEPS}

keras.utils.set_random_seed(3)
layers = [keras.layers.Dense({WIDTH}, "tanh", use_bias=False) for _ in range({LAYERS})]
model = keras.Sequential([keras.Input(({WIDTH},)), *layers])
model.compile(getattr(keras.optimizers, sys.argv[1])(), "mse")
x, count = np.ones((6 * {STEPS}, {WIDTH}), "float32"), Count()
model.fit(x, x, 6, epochs=2, verbose=0, callbacks=[count])
print("BYTES", count.bytes)
"""

#: The bytes of all weights, and what a process of a ring sends of each tensor that is summed in
#: slices, or gathered from them.
WEIGHTS = 4 * LAYERS * WIDTH**2
SLICES = WEIGHTS * (PROCESSES - 1) / PROCESSES


def _sent(folder: Path, flags: list[str], optimizer: str) -> list[float]:
    """The bytes that each process sends in a step."""
    (folder / "train.py").write_text(SCRIPT)
    ranks = range(PROCESSES)
    with network([str(rank) for rank in ranks]) as made:
        workers = [f"{made[str(rank)][1]}:2222" for rank in ranks]
        tasks = []
        for rank in ranks:
            task = {"type": "worker", "index": rank}
            config = json.dumps({"cluster": {"worker": workers}, "task": task})
            inside = ["ip", "netns", "exec", made[str(rank)][0]]
            options = ["--strategy", "multi_worker", "--log-dir", f"logs{rank}", *flags]
            tasks.append(
                subprocess.Popen(
                    [*inside, *TFDIST, "run", *options, "train.py", optimizer],
                    cwd=folder,
                    env=environment.merged({"TF_CONFIG": config}),
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        try:
            outputs = [task.communicate(timeout=DEADLINE) for task in tasks]
        finally:
            for task in tasks:
                task.kill()
    assert [task.returncode for task in tasks] == [0] * PROCESSES, printed(outputs)
    return [float(out.partition("BYTES ")[2].split()[0]) for out, _ in outputs]


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize(
    ("flags", "optimizer", "slices"),
    [
        # A ring's all-reduce: sums in slices, which are then gathered.
        *seldom(([], "Adam", 2)),
        # The same, and the new weights are gathered.
        *seldom((["--zero", "1"], "Adam", 3)),
        # Sums in slices; the new weights.
        *seldom((["--zero", "2"], "Adam", 2)),
        *seldom((["--zero", "2"], "Lamb", 2)),
        # The weights twice, but for the first layer's, whose inputs need no gradients; sums.
        (["--zero", "3"], "Adam", 3 - 1 / LAYERS),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_a_step_sends_what_the_formula_says(
    tmp_path: Path, flags: list[str], optimizer: str, slices: float, record_property: Any
) -> None:
    """Headers, acknowledgements and what the processes agree on are less than 8 %."""
    sent = _sent(tmp_path, flags, optimizer)
    found = [each / (slices * SLICES) for each in sent]
    record_property("sent to formula", found)
    print(f"{flags} {optimizer}: {sent} bytes a step, to the formula {found}")
    assert found == pytest.approx([1.0] * PROCESSES, abs=0.08)
