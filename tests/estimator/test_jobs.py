"""Jobs of Estimators on parameter servers, started as a user starts them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.estimator.test_estimator import descended, predicted
from tests.harness.targets import free_ports
from tests.jobs.test_jobs import ROOT, TFDIST, left_over, run, tf_config
from tfdist import environment

#: A job whose model is that of the other tests. Its tasks find what differs in `settings.json`.
SCRIPT = f"""
import json, os, pathlib, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
import numpy as np, tensorflow as tf
from tests.cases import estimator_cases as cases
from tfdist import estimator
tf1 = tf.compat.v1
given = json.loads(pathlib.Path("settings.json").read_text())

def model_fn(features, labels, mode, params, config):
    if mode != "train" or not given["sync"]:
        return cases.model_fn(features, labels, mode, params)
    spec = cases.model_fn(features, labels, "eval", params)
    workers = config.num_worker_replicas
    inner = tf1.train.GradientDescentOptimizer(cases.RATE)
    wanted = workers - given["spare"]
    optimizer = tf1.train.SyncReplicasOptimizer(inner, wanted, workers)
    step = optimizer.minimize(spec.loss, global_step=tf1.train.get_global_step())
    hook = optimizer.make_session_run_hook(config.is_chief, num_tokens=0)
    return estimator.EstimatorSpec(mode, loss=spec.loss, train_op=step, training_hooks=[hook])

def train_fn(config):
    data = cases.batches(16)() if not given["sync"] else cases.batches(8)().repeat()
    if given["sync"]:
        data = data.shard(config.num_worker_replicas, config.global_id_in_cluster)
    return data.repeat()

class Killing(estimator.SessionRunHook):
    "The worker dies once; when it is back and trains, the chief stops."
    steps = 0
    def after_run(self, run_context, run_values):
        self.steps += 1
        dead, back = pathlib.Path("dead"), pathlib.Path("back")
        if config.task_type == "worker" and self.steps == 10:
            if not dead.exists():
                dead.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            back.touch()
        if back.exists():
            run_context.request_stop()
        time.sleep(0.01)

class Slow(estimator.SessionRunHook):
    "Counts the steps of this task; the first of a spare worker lasts until the chief is done."
    steps = 0
    def after_run(self, run_context, run_values):
        self.steps += 1
        while given["spare"] and config.task_type == "worker" and not done.exists():
            time.sleep(0.01)
    def end(self, session):
        if config.is_chief:
            done.touch()

slow, done = Slow(), pathlib.Path("done")
config = estimator.RunConfig("model", save_checkpoints_steps=100, log_step_count_steps=None)
model = estimator.Estimator(model_fn, config=config, params={{}})
receiver = estimator.export.build_raw_serving_input_receiver_fn(
    {{"x": tf.TensorSpec([None, 3], tf.float32)}}
)
result = estimator.train_and_evaluate(
    model,
    estimator.TrainSpec(train_fn, given["steps"], hooks=[Killing()] if given["kill"] else [slow]),
    estimator.EvalSpec(
        cases.batches(16, 1), exporters=estimator.FinalExporter("final", receiver),
        start_delay_secs=0, throttle_secs=1,
    ),
)
assert result is None
where = (config.task_type, config.task_id, config.is_chief, config.num_worker_replicas)
print("TASK", *where, config.num_ps_replicas, config.global_id_in_cluster)
print("STEPS", slow.steps)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Runs the job in a folder of its own."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (tmp_path / "job.py").write_text(SCRIPT)

    def start(*words, steps, sync=False, kill=False, spare=0):
        settings = {"steps": steps, "sync": sync, "kill": kill, "spare": spare}
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        words = ("--strategy", "parameter_server", *words, "job.py")
        done = run(tmp_path, *TFDIST, "run", *words, CUDA_VISIBLE_DEVICES="-1")
        assert done.returncode == 0, done.stderr[-3000:] + logs(tmp_path)
        assert left_over(tmp_path) == []
        return done

    return start


def logs(folder: Path) -> str:
    texts = sorted((folder / "tfdist-logs/latest").glob("*.log"))
    return "".join(f"\n== {each.name}\n{each.read_text()[-2000:]}" for each in texts)


def written(cluster, folder, name):
    call = cluster("plain").call
    return call("tests.cases.estimator_cases:written", path=str(folder / "model"), export=name)[0]


def test_asynchronous_workers_and_an_evaluator(job, cluster, tmp_path):
    done = job("-n", 2, "--ps", 1, "--evaluator", steps=600)
    assert "job.py uses tfdist.estimator" in " ".join(done.stderr.split()).replace("│ ", "")
    said = logs(tmp_path)
    for task in ("chief 0 True 2 1 0", "worker 0 False 2 1 1", "evaluator 0 False 0 0 None"):
        assert f"TASK {task}" in said, said
    found = written(cluster, tmp_path, "final")
    assert found["step"] >= 600
    value, y = predicted(found["weights"])
    loss = float(((value - y) ** 2).mean())
    assert loss < 0.02
    np.testing.assert_allclose(found["evaluations"][found["step"]]["loss"], loss, rtol=1e-4)
    assert len(found["evaluations"]) >= 1
    np.testing.assert_allclose(found["exported"], value, atol=1e-5)


@pytest.mark.core
def test_synchronous_workers_equal_one_process(job, cluster, tmp_path):
    job("-n", 2, "--ps", 1, steps=30, sync=True)
    found = written(cluster, tmp_path, None)
    assert found["step"] == 30
    np.testing.assert_allclose(found["weights"], descended(30), atol=1e-5)


@pytest.mark.seldom  # tests/servers has backup workers.
def test_a_backup_worker_is_not_waited_for(job, cluster, tmp_path):
    job("-n", 2, "--ps", 1, steps=30, sync=True, spare=1)
    assert written(cluster, tmp_path, None)["step"] == 30
    slow = (tmp_path / "tfdist-logs/latest/worker-0.log").read_text()
    assert int(re.findall(r"^STEPS (\d+)$", slow, re.MULTILINE)[0]) <= 2, slow


def test_a_killed_worker_rejoins(job, cluster, tmp_path):
    done = job("-n", 2, "--ps", 1, "--max-restarts", 1, steps=None, kill=True)
    said = "worker 0 was ended by signal 9 (SIGKILL). It is started again in its place"
    assert said in " ".join(done.stderr.split())
    found = written(cluster, tmp_path, None)
    assert found["step"] > 20
    value, y = predicted(found["weights"])
    assert ((value - y) ** 2).mean() < 0.1


#: As TensorFlow's guide to Estimators begins, on `tf.estimator`.
ON_GRAPHS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import tensorflow as tf
tf.compat.v1.disable_eager_execution()
import tfdist
from tests.cases import estimator_cases as cases
from tfdist import estimator
strategy = tfdist.strategy("multi_worker") if sys.argv[1:] == ["own"] else None
config = estimator.RunConfig("model", save_checkpoints_steps=5, train_distribute=strategy)
model = estimator.Estimator(cases.model_fn, config=config, params={{}})
estimator.train_and_evaluate(
    model,
    estimator.TrainSpec(lambda input_context: cases._shard(input_context, (50, 50)), max_steps=12),
    estimator.EvalSpec(cases.batches(16, 1), steps=None),
)
"""


@pytest.mark.parametrize("own", [False, True], ids=["job's strategy", "script's strategy"])
def test_workers_of_a_program_without_eager_execution(cluster, tmp_path, monkeypatch, own):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (tmp_path / "job.py").write_text(ON_GRAPHS)
    if own:
        ports = free_ports(2)
        command, configs = [sys.executable, "job.py", "own"], [tf_config(ports, i) for i in (0, 1)]
    else:
        command, configs = [*TFDIST, "run", "-s", "multi_worker", "-n", "2", "job.py"], [None]
    with ThreadPoolExecutor(len(configs)) as both:
        started = [
            both.submit(run, tmp_path, *command, TF_CONFIG=each, CUDA_VISIBLE_DEVICES="-1")
            for each in configs
        ]
    for each in started:
        assert each.result().returncode == 0, each.result().stderr[-3000:]
    found = written(cluster, tmp_path, None)
    assert found["step"] == 12
    np.testing.assert_allclose(found["weights"], descended(12), atol=1e-5)
    assert list(found["evaluations"]) == [12]


#: The same program as any task of TensorFlow 1's kind of cluster.
OF_A_MASTER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.cases import estimator_cases as cases
from tfdist import estimator
config = estimator.RunConfig("model", save_checkpoints_steps=5)
print("TASK", config.task_type, config.cluster_spec.jobs, config.evaluation_master == "")
model = estimator.Estimator(cases.model_fn, config=config, params={{}})
metrics, _ = estimator.train_and_evaluate(
    model,
    estimator.TrainSpec(cases.batches(16), max_steps=12),
    estimator.EvalSpec(cases.batches(16, 1), steps=None, throttle_secs=0),
)
print("LOSS", metrics["loss"])
"""


def test_a_master_evaluates_by_itself(cluster, tmp_path):
    (tmp_path / "job.py").write_text(OF_A_MASTER)
    master, ps = (f"127.0.0.1:{port}" for port in free_ports(2))
    configs = [
        json.dumps(
            {"cluster": {"master": [master], "ps": [ps]}, "task": {"type": kind, "index": 0}}
        )
        for kind in ("master", "ps")
    ]
    command = [sys.executable, "job.py"]
    environs = [environment.merged({"TF_CONFIG": each}) for each in configs]
    with subprocess.Popen(command, cwd=tmp_path, env=environs[1]) as server:
        try:
            done = run(tmp_path, *command, **environs[0])
        finally:
            server.kill()
    assert done.returncode == 0, done.stderr[-3000:]
    assert "TASK master ['master', 'ps'] True" in done.stdout
    found = written(cluster, tmp_path, None)
    np.testing.assert_allclose(found["weights"], descended(12), atol=1e-5)
    assert list(found["evaluations"]) == [5, 10, 12]
    value, y = predicted(found["weights"])
    (loss,) = re.findall(r"^LOSS (\S+)$", done.stdout, re.MULTILINE)
    np.testing.assert_allclose(float(loss), ((value - y) ** 2).mean(), rtol=1e-4)
