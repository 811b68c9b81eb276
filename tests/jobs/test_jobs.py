"""Whole jobs: real processes, real TensorFlow, started as a user starts them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.targets import free_ports
from tests.harness.tiers import seldom
from tfdist import environment
from tfdist.cli.init import TRAINING_SCRIPT
from tfdist.launcher.root_cause import is_consequence

ROOT = Path(__file__).parents[2]
TFDIST = [str(Path(sys.executable).with_name("tfdist"))]
DEADLINE = 150

SCRIPT = """
import sys
import keras, numpy as np
x = np.random.rand(203, 4).astype("float32")  # unseeded: all tasks must draw alike
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)
print("RESULT", history.history["loss"][-1], sys.argv[1:], __name__)
model.save("model.keras")
"""

#: Prints STARTED when it trains.
ENDLESS = """
import keras, numpy as np
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
class Say(keras.callbacks.Callback):
    said = False
    def on_train_batch_end(self, batch, logs=None):
        if not self.said:
            print("STARTED", flush=True)
        self.said = True
model.fit(np.zeros((640, 4)), np.zeros((640, 1)), epochs=100000, verbose=0, callbacks=[Say()])
"""


FILES = {"train.py": SCRIPT, "endless.py": ENDLESS}


def run(folder, *command, **environ):
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=environment.merged(environ),
        text=True,
        capture_output=True,
        timeout=DEADLINE,
    )


def printed(outputs):
    """What several processes printed, to be shown whole when a test fails."""
    each = outputs.items() if isinstance(outputs, dict) else enumerate(outputs)
    return "\n".join(
        f"== {name}\n{one if isinstance(one, str) else ''.join(one)}" for name, one in each
    )


def results(text):
    return re.findall(r"^RESULT (\S+) (.*)$", text, re.MULTILINE)


def log(folder, task):
    return (folder / "tfdist-logs/latest" / f"{task}.log").read_text()


def tf_config(ports, index):
    workers = [f"127.0.0.1:{port}" for port in ports]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


def left_over(folder):
    """Processes that still work in the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if entry.resolve() == folder.resolve():
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


def wait_until_gone(folder, seconds):
    deadline = time.monotonic() + seconds
    while left_over(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left_over(folder)


@pytest.mark.core
def test_one_flag_and_the_same_numbers(folder):
    single = run(folder, *TFDIST, "run", "--seed", 3, "train.py", "--own", "-n", "7")
    multi = run(
        folder, *TFDIST, "run", "--strategy", "multi_worker", "-n", 2, "--seed", 3, "train.py"
    )
    assert single.returncode == 0, single.stderr
    assert multi.returncode == 0, multi.stderr
    assert "global batch: 32 examples a step → 16 + 16" in multi.stderr
    assert "global batch" not in single.stderr
    (one,) = results(single.stdout)
    assert one[1] == "['--own', '-n', '7'] __main__"
    (chief,) = results(multi.stdout)
    (other,) = results(log(folder, "worker-1"))
    assert chief[0] == other[0]
    assert float(chief[0]) == pytest.approx(float(one[0]), abs=1e-6)
    assert (folder / "model.keras").exists()
    assert left_over(folder) == []


def test_a_task_that_throws_ends_the_job_with_its_status_and_last_lines(folder):
    (folder / "bad.py").write_text(
        SCRIPT.replace(
            'model.compile("sgd", "mse")',
            """model.compile("sgd", "mse")
class Bad(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        import json, os
        if batch == 3 and json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            sys.exit(17)
model.fit(x, y, batch_size=32, verbose=0, callbacks=[Bad()])
""",
        )
    )
    done = run(folder, *TFDIST, "run", "--strategy", "multi_worker", "-n", 2, "bad.py")
    assert done.returncode == 17
    assert "worker 1 failed with exit status 17" in done.stderr
    assert left_over(folder) == []


LOST = """
import os
class Lose(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            os.kill(os.getpid(), 9)
model.fit(x, y, batch_size=32, verbose=0, callbacks=[Lose()], epochs=1000)
"""


@pytest.mark.parametrize("whole", [*seldom(False), True])
def test_a_task_that_lost_another_names_the_line_it_was_at(folder, whole):
    switch = "keras.config.disable_traceback_filtering()\n" * whole
    script = SCRIPT.partition("history =")[0].replace("import sys", "import json") + switch + LOST
    (folder / "lost.py").write_text(script)
    ports = free_ports(2)
    tasks = [
        subprocess.Popen(
            [*TFDIST, "run", "--log-dir", f"logs{i}", "lost.py"],
            cwd=folder,
            env=environment.merged({"TF_CONFIG": tf_config(ports, i)}),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for i in range(2)
    ]
    outputs = [task.communicate(timeout=DEADLINE)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [1, 137], printed(outputs)
    lines = (folder / "logs0/worker-0.log").read_text().splitlines()
    assert is_consequence(lines), printed(outputs)
    assert ("Traceback (most recent call last):" in lines) is whole
    if not whole:
        start = lines.index("tfdist: this task ends because another was lost. The program was at:")
        at = len(script.rstrip().splitlines())
        assert lines[start + 1].strip() == f'File "lost.py", line {at}, in <module>'
        assert lines[start + 2].strip().startswith("model.fit(x, y, batch_size=32,")
        assert lines[start + 3].startswith("tensorflow.python.framework.errors_impl.")
        assert len(lines) - start < 10, printed(outputs)


def failed(folder, script):
    """Two workers that run a script which ends in an error."""
    (folder / "bad.py").write_text(script)
    done = run(folder, *TFDIST, "run", "--strategy", "multi_worker", "-n", 2, "bad.py")
    assert done.returncode == 1
    return done


def test_workers_with_the_same_error_show_it_once(folder):
    done = failed(
        folder,
        "import atexit, json, os, time\n"
        "if json.loads(os.environ['TF_CONFIG'])['task']['index'] == 0:\n"
        "    atexit.register(time.sleep, 0.7)  # The worker that is shown ends last.\n"
        "{}['missing']\n",
    )
    assert done.stderr.count("KeyError: 'missing'") == 1, done.stderr
    assert "tfdist: worker 1 failed with exit status 1.\nIts error is the one of" in done.stderr


def test_a_task_that_waits_for_the_others_does_not_bury_their_error(folder):
    done = failed(
        folder,
        "import json, os, time\n"
        "if json.loads(os.environ['TF_CONFIG'])['task']['index'] == 1:\n"
        "    time.sleep(2)\n"
        "    raise ValueError('only here')\n",
    )
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "  ValueError: only here\n" in done.stderr


def test_commands_on_several_machines_make_the_cluster(folder):
    ports = free_ports(2)
    tasks = [
        subprocess.Popen(
            [*TFDIST, "run", "--log-dir", f"logs{i}", "train.py"],
            cwd=folder,
            env=environment.merged({"TF_CONFIG": tf_config(ports, i)}),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]
    outputs = [task.communicate(timeout=DEADLINE) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], printed(outputs)
    losses = {results(out)[0][0] for out, _ in outputs}
    assert len(losses) == 1


def test_a_missing_task_is_named_within_the_deadline(folder):
    ports = free_ports(2)
    done = run(
        folder, *TFDIST, "run", "--start-timeout", 3, "train.py", TF_CONFIG=tf_config(ports, 0)
    )
    assert done.returncode == 3
    said = done.stdout + done.stderr
    assert re.search(rf"worker 1 +127.0.0.1:{ports[1]} +no +no +connection refused", said)


def test_a_program_with_its_own_flag_needs_no_launcher(folder):
    ports = free_ports(2)
    tasks = [
        subprocess.Popen(
            [
                sys.executable,
                *(str(ROOT / "examples/custom_loop.py"), "--epochs", "2"),
                *("--strategy", "multi_worker"),
            ],
            cwd=folder,
            env=environment.merged({"TF_CONFIG": tf_config(ports, i)}),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for i in range(2)
    ]
    outputs = [task.communicate(timeout=DEADLINE)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], printed(outputs)
    # The last one to end may hear from TensorFlow that the other one has gone.
    shown = [
        [x for x in each.splitlines() if x.startswith(("epoch", "accuracy"))] for each in outputs
    ]
    assert shown[0][-1].startswith("accuracy on unseen digits")
    assert len(shown[0]) == 3
    assert shown[0] == shown[1]


def test_env_only_runs_a_script_that_builds_its_own_strategy(folder):
    (folder / "own.py").write_text(
        "import tensorflow as tf\n"
        "strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
        "print('REPLICAS', strategy.num_replicas_in_sync)\n"
    )
    done = run(
        folder, *TFDIST, "run", "--strategy", "multi_worker", "-n", 2, "--env-only", "own.py"
    )
    assert done.returncode == 0, done.stderr
    assert "REPLICAS 2" in done.stdout
    assert "REPLICAS 2" in log(folder, "worker-1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_stopping_the_launcher_leaves_nothing_behind(folder, number):
    job = subprocess.Popen(
        [*TFDIST, "run", "--strategy", "multi_worker", "-n", "2", "endless.py"],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("STARTED"):
            break
    job.send_signal(number)
    assert job.wait(timeout=30) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert wait_until_gone(folder, 5) == []


def test_verify_compares_one_process_with_two(folder):
    done = run(
        folder, *TFDIST, "verify", "-n", 2, "--steps", 8, "--json", ROOT / "examples/digits.py"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert len(report["rows"]) == 8
    assert report["missing"] == report["repeated"] == 0
    assert report["examples_one"] == report["examples_many"] == 8 * 64


@pytest.mark.seldom
def test_verify_takes_a_module(folder):
    (folder / "program").mkdir()
    shutil.copy(TRAINING_SCRIPT, folder / "program/train.py")
    done = run(folder, *TFDIST, "verify", "--steps", 2, "--json", "-m", "program.train")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 2


@pytest.mark.seldom  # The tests beside it compare scripts.
def test_verify_has_a_script_of_its_own(folder):
    done = run(folder, *TFDIST, "verify", "--demo", "--steps", 4, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert len(report["rows"]) == 4
    assert sorted(path.name for path in folder.iterdir()) == ["endless.py", "train.py"]


def test_verify_finds_where_a_script_differs(folder):
    (folder / "differs.py").write_text(
        "import keras, numpy as np\n"
        "import tensorflow as tf\n"
        "keras.utils.set_random_seed(tf.distribute.get_strategy().num_replicas_in_sync)\n"
        "x = np.random.rand(64, 4).astype('float32')\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name='head')])\n"
        "model.compile('sgd', 'mse')\n"
        "model.fit(x, x.sum(1), batch_size=16, verbose=0)\n"
    )
    done = run(
        folder,
        *TFDIST,
        *("verify", "--strategy", "mirrored", "-n", 2, "--steps", 3, "--json", "differs.py"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert not report["ok"]
    assert report["first_difference"] == 1
    assert "head" in report["rows"][0]["where"]
    assert report["missing"] == 48
