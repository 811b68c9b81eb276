"""`tfdist report` of real jobs: the records that a launcher and its tasks have written."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from tests.jobs.test_jobs import TFDIST, log, run
from tfdist.diagnostics import run_data, run_parts
from tfdist.diagnostics.run_data import STEP_PARTS

SCRIPT = """
import keras, numpy as np, tensorflow as tf
rng = np.random.default_rng(0)
x = rng.normal(size=(192, 8)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(16).prefetch(2)
model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
model.fit(data, epochs=3, validation_data=data, verbose=2)
"""
SVG = "{http://www.w3.org/2000/svg}svg"


def page_of(folder, *words, script=SCRIPT):
    """A job's end on the terminal, the page of its records, and these."""
    (folder / "train.py").write_text(script)
    done = run(folder, *TFDIST, "run", *words, "train.py", TF_CONFIG=None)
    assert done.returncode == 0, done.stderr
    made = run(folder, *TFDIST, "report")
    assert made.returncode == 0, made.stderr
    place = (folder / "tfdist-logs/latest").resolve()
    page = ET.fromstring((place / "report.html").read_text())
    return done.stderr, page, run_data.load(place)


def epochs_of(page):
    (section,) = [each for each in page.iter("section") if each.findtext("h2") == "Epochs"]
    return [row.findtext("td") for row in section.iter("tr")][1:]


@pytest.mark.core
def test_a_job_of_two_processes(tmp_path):
    said, page, found = page_of(tmp_path, "-s", "multi_worker", "-n", "2")
    assert epochs_of(page) == ["1", "2", "3"]
    assert len(list(page.iter(SVG))) == 5
    assert "examples a second\n" in said
    for task in found.tasks:
        assert [each.steps for each in task.epochs] == [12, 12, 12]
        assert {each.batch for each in task.epochs} == {16}
        assert task.windows[0].first
        assert task.peak_rss > 100 * 2**20
        assert [end.status for end in task.ends] == [0]
    shown = log(tmp_path, "worker-0")
    assert f"loss: {found.epochs[-1].logs['loss']:.4f}" in shown
    assert (found.state, found.restarts) == ("done", 0)
    assert [each.partition(":")[0] for each in found.lacks] == ["Staleness", "Timeline"]


@pytest.mark.parametrize("strategy", ["multi_worker", "horovod"])
@pytest.mark.seldom  # tests/cli/test_report.py and the contract suite have parts.
def test_the_parts_of_each_task_s_steps(tmp_path, strategy):
    """Worker 1 takes 30 ms longer for each of its batches, so worker 0 waits for it."""
    late = """
import time
delay = 0.03 * (tf.distribute.get_strategy().shard.worker == 1)
def read(x):
    time.sleep(delay)
    return x
data = data.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(read, [x], x.dtype), x.shape), y))
model ="""
    script = SCRIPT.replace("\nmodel =", late).replace(".prefetch(2)", "")
    _, page, found = page_of(tmp_path, "-s", strategy, "-n", "2", "--report", script=script)
    for task in found.tasks:
        assert task.windows[0].first
        assert all(set(STEP_PARTS) <= set(each.parts) for each in (*task.windows, *task.epochs))
    fast, slow = run_parts.by_task(found).values()
    assert slow.input > 10 > fast.input
    assert fast.wait > 10 > slow.wait
    assert fast.step == pytest.approx(
        fast.wait + fast.exchange + fast.input + fast.compute + fast.rest
    )
    assert "wait for other tasks" in "".join(page.itertext())


@pytest.mark.seldom  # tests/cli/test_report.py draws records of servers.
def test_a_job_with_servers(tmp_path):
    words = ("-s", "parameter_server", "--mode", "async", "-n", "2", "--ps", "1")
    _, page, found = page_of(tmp_path, *words)
    assert epochs_of(page) == ["1", "2", "3"]
    assert len(list(page.iter(SVG))) == 6  # the staleness too
    counts = [sum(each["staleness"]) for each in found.chief.server_epochs]
    assert counts == [12, 12, 12]
    assert {task.name for task in found.tasks if task.peak_rss} == {
        *("chief 0", "worker 0", "worker 1", "ps 0")
    }


def test_a_full_disk_costs_the_record_only(tmp_path):
    (tmp_path / "logs/worker-0.jsonl").mkdir(parents=True)  # nothing can be written there
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(tmp_path, *TFDIST, "run", "--log-dir", "logs", "train.py", TF_CONFIG=None)
    assert done.returncode == 0, done.stderr
    assert "Epoch 3/3" in done.stdout
    assert "examples a second" not in done.stderr
