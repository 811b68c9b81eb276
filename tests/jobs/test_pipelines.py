"""Jobs whose model is in stages, on several tasks or on the devices of one process."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.jobs.test_jobs import TFDIST, left_over
from tests.jobs.test_jobs import run as run_command
from tests.jobs.test_servers import ENDLESS, kill, started, wait_for

SCRIPT = """
import sys
import keras, numpy as np
from keras import layers
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(96, 12)).astype("float32")
y = (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0)
h = inputs = keras.Input((12,))
for i in range(4):
    h = layers.Dense(24, "tanh", name=f"dense{i}")(h)
model = keras.Model(inputs, layers.Dense(3, name="head")(h))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
fit = model.fit(x, y, batch_size=16, epochs=3, verbose=0, shuffle=False)
found = model.evaluate(x, y, verbose=0)
np.savez(sys.argv[1], *model.get_weights(), loss=fit.history["loss"], found=found)
if len(sys.argv) > 2:
    model.save(sys.argv[2])
"""


def run(folder, *words, status=0):
    done = run_command(folder, *TFDIST, "run", *words)
    assert done.returncode == status, done.stdout + done.stderr
    return done


FILES = {
    "script.py": SCRIPT,
    "endless.py": ENDLESS.replace("layers.Dense(1)]", "layers.Dense(4), keras.layers.Dense(1)]"),
}


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as content:
        return dict(content)


def test_a_timeline_that_cannot_be_written_in_the_end_loses_nothing(folder):
    blocking = SCRIPT.replace("fit = ", "open('out', 'w').close()\nfit = ")
    (folder / "blocking.py").write_text(blocking)
    words = ("-s", "pipeline", "--devices", 2, "--timeline", "out/step.json", "blocking.py")
    done = run(folder, *words, "two.npz", "two.keras")
    assert "The timeline 'out/step.json' could not be written" in done.stdout + done.stderr
    assert (folder / "two.npz").exists()
    assert (folder / "two.keras").exists()


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict[str, np.ndarray]:
    """What one process trains."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "script.py").write_text(SCRIPT)
    done = run_command(folder, *TFDIST, "run", "-s", "single", "script.py", "one.npz")
    assert done.returncode == 0, done.stderr
    return arrays(folder / "one.npz")


def check_trained(one: dict[str, np.ndarray], folder: Path) -> None:
    other = arrays(folder / "many.npz")
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], atol=1e-5, err_msg=name)
    assert not left_over(folder)


@pytest.mark.core
def test_two_tasks_train_what_one_does(folder, one):
    options = ("-n", 2, "--microbatches", 4, "--timeline", "step.json")
    done = run(folder, "-s", "pipeline", *options, "script.py", "many.npz", "many.keras")
    check_trained(one, folder)
    # The plan is the user's to see, and the timeline of a step is a trace.
    assert "dense3" in done.stdout + done.stderr
    events = json.loads((folder / "step.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) >= 2 * 2 * 4
    assert (folder / "many.keras").exists()


@pytest.mark.seldom  # tests/pipelines trains on devices.
def test_two_devices_train_what_one_does(folder, one):
    cut = ("--devices", 2, "--cuts", "dense2")
    run(folder, "-s", "pipeline", *cut, "script.py", "many.npz")
    check_trained(one, folder)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not in PATH")
@pytest.mark.seldom  # test_horovod.py has a job of mpirun.
def test_two_tasks_of_mpirun_train_what_one_does(folder, one):
    mpi = ("--on", "mpi", "--engine-args", "--allow-run-as-root --oversubscribe")
    run(folder, "-s", "pipeline", "-n", 2, "--microbatches", 4, *mpi, "script.py", "many.npz")
    check_trained(one, folder)


@pytest.mark.seldom  # test_jobs.py has verify.
def test_verify_compares_a_pipeline_with_one_process(folder):
    options = ("--strategy", "pipeline", "--steps", 4, "--json")
    done = run_command(folder, *TFDIST, "verify", *options, "script.py", "x.npz")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"]


def test_a_lost_stage_ends_the_job_with_its_name(folder):
    with started(folder, "-s", "pipeline", "-n", 2, "--microbatches", 2, "endless.py") as process:
        wait_for(folder / "training")
        begun = time.monotonic()
        kill(folder, "worker", 0)
        out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "worker 0" in out
    assert time.monotonic() - begun < 30
    assert not left_over(folder)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-s", "pipeline", "-n", 3, "--stages", 2], "--stages 2 does not divide the 3 devices"),
        (["-s", "mirrored", "--stages", 2], "--stages 2 conflicts with --strategy mirrored"),
        (["-s", "pipeline", "--schedule", "zigzag"], "Unknown --schedule 'zigzag'"),
        (["-s", "pipeline", "-n", 2, "--devices", 2], "--devices 2 conflicts with -n 2"),
        (["-s", "pipeline", "--mode", "stale"], "--mode stale does not go with"),
        (["-s", "pipeline", "-n", 2, "--accumulate", 2], "--accumulate 2 conflicts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_told_before_anything_starts(folder, words, told):
    done = run(folder, *words, "script.py", "x.npz", status=2)
    assert told in done.stderr


ASSIGNING = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
model = keras.Sequential(
    [keras.Input((6,)), keras.layers.Dense(1500, "relu"), keras.layers.Dense(3, name="last")]
)
model.compile("sgd", "mse")
model.fit(x, x[:, :3], verbose=0)
call, bias = tf.function(lambda inputs: model(inputs)), model.layers[-1].bias
bias.assign(np.zeros(3))
start = [np.array(each(x)) for each in (model.predict_on_batch, call)]
wrong = [0, 0]
for value in range(60):
    bias.assign(np.full(3, value)) if value % 3 else bias.value.assign(np.full(3, value))
    found = np.array((model.predict_on_batch, call)[value % 2](x))
    wrong[value % 2] += not np.allclose(found, start[value % 2] + value, atol=1e-3)
print("wrong:", wrong)
"""


def test_a_function_sees_a_weight_that_was_just_assigned_on_another_task(folder):
    (folder / "assigning.py").write_text(ASSIGNING)
    done = run(folder, "-s", "pipeline", "-n", 2, "--cuts", "last", "assigning.py")
    assert "wrong: [0, 0]" in done.stdout
