"""`tfdist.launch`: functions of notebooks and of programs, in real kernels and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nbclient
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

import tfdist
import tfdist.cli.launch
from tests.jobs.test_jobs import DEADLINE, run

DEFINITION = """
import keras, numpy as np, tfdist

def model_of(units):
    return keras.Sequential([keras.layers.Dense(units), keras.layers.Dense(1)])

def train(units, epochs=1):
    model = model_of(units)
    model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    history = model.fit(x, x[:, :1], epochs=epochs, verbose=2)
    return model, history.history["loss"], tfdist.strategy().num_replicas_in_sync
"""


class Notebook:
    """A notebook in a kernel of its own."""

    def __init__(self, folder: Path) -> None:
        self.book = nbformat.v4.new_notebook()
        self.client = nbclient.NotebookClient(
            self.book, timeout=DEADLINE, resources={"metadata": {"path": str(folder)}}
        )

    def run(self, code: str) -> str:
        """Runs code in a new cell; returns what the cell shows."""
        self.book.cells.append(nbformat.v4.new_code_cell(code))
        cell = self.client.execute_cell(self.book.cells[-1], len(self.book.cells) - 1)
        return shown(cell)

    def shown(self) -> str:
        """What the last cell shows by now."""
        return shown(self.book.cells[-1])


def shown(cell: nbformat.NotebookNode) -> str:
    return "".join(each.get("text", "") for each in cell.get("outputs", ()))


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(tmp_path)
    with made.client.setup_kernel():
        yield made


def members_of(folder: Path) -> list[int]:
    """The processes whose working directory this is, but for kernels."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes()
            if (place / "cwd").resolve() == folder and b"ipykernel" not in command:
                found.append(int(place.name))
        except OSError:
            continue
    return found


def wait_until_gone(folder: Path) -> None:
    end = time.monotonic() + 20
    while members_of(folder) and time.monotonic() < end:
        time.sleep(0.1)
    assert members_of(folder) == []


def test_a_function_of_a_notebook(notebook: Notebook) -> None:
    notebook.run(DEFINITION)
    said = notebook.run(
        "model, losses, replicas = tfdist.launch(train, (3,), {'epochs': 2},"
        " strategy='multi_worker', processes=2, seed=1)"
    )
    assert "worker 1 at" in said
    assert "Epoch 2/2" in said
    text = notebook.run("print(replicas, len(losses), model.predict(np.ones((1, 4))).shape)")
    assert "2 2 (1, 1)" in text


def test_an_interrupt_ends_all_processes(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(DEFINITION)

    def interrupt() -> None:
        end = time.monotonic() + DEADLINE
        while "Epoch 2/" not in notebook.shown() and time.monotonic() < end:
            time.sleep(0.1)
        os.kill(notebook.client.km.provisioner.pid, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        notebook.run("tfdist.launch(train, (3, 100000), strategy='multi_worker', processes=2)")
    thread.join()
    assert "Stopped by Ctrl-C" in notebook.shown()
    wait_until_gone(tmp_path)
    assert notebook.run("print('goes on')") == "goes on\n"


PROGRAM = f"""{DEFINITION}
import sys, threading

def fail():
    raise ValueError("no data")

def lock():
    return threading.Lock()

if __name__ == "__main__":
    print("RESULT", tfdist.launch(globals()[sys.argv[1]], tuple(map(int, sys.argv[2:]))))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_a_function_that_fails(program: Path) -> None:
    done = run(program, sys.executable, "program.py", "fail")
    assert 'program.py", line ' in done.stdout
    assert "ValueError: no data" in done.stdout
    assert "TaskFailedError" in done.stderr
    assert done.returncode == 1


@pytest.mark.seldom  # As a function that fails, above.
def test_a_result_that_cannot_be_sent(program: Path) -> None:
    done = run(program, sys.executable, "program.py", "lock")
    assert "The result of type lock cannot be sent to another process" in done.stdout


def test_the_processes_end_with_their_caller(program: Path) -> None:
    command = [sys.executable, "program.py", "train", "3", "100000"]
    caller = subprocess.Popen(command, cwd=program, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    assert any("Epoch 2/" in line for line in caller.stdout)
    caller.kill()
    caller.wait()
    caller.stdout.close()
    wait_until_gone(program)


#: A model of classes and functions that Keras knows by names, of the program and of the function.
CUSTOM = """
import pathlib, pickle, sys
import keras, numpy as np, tfdist

x = np.ones((8, 4), "float32")

@keras.saving.register_keras_serializable("my", "Double")
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x

class Plain(keras.layers.Layer):
    def call(self, x):
        return x + 1

def half(x):
    return x / 2

def off(y, predicted):
    return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)

def train(plain):
    class Local(keras.layers.Layer):
        def call(self, x):
            return x - 1

    model = keras.Sequential([Twice(), plain(), Local(), keras.layers.Dense(1, activation=half)])
    model.compile("sgd", off)
    history = model.fit(x, x[:, :1], verbose=0)
    return {"model": model, "predicted": model.predict(x, verbose=0), "plain": plain()}

def on(model):
    return model.predict(x, verbose=0)

class Refusing:
    open = False

    def __reduce__(self):
        return loaded, ()

def loaded():
    if not Refusing.open:
        raise ValueError("not yet")
    return 7

def end(code=0):
    sys.exit(code)

if __name__ == "__main__":
    if sys.argv[1] == "train":
        result = tfdist.launch(train, (Plain,), strategy="single")
        model, layers = result["model"], result["model"].layers
        own = [type(layers[0]) is Twice, type(layers[1]) is Plain, layers[3].activation is half]
        print("OWN", own, type(result["plain"]) is Plain, model.loss is off)
        print("SAME", np.allclose(model.predict(x, verbose=0), result["predicted"]))
        sent = tfdist.launch(on, (model,), strategy="single")
        print("SENT", np.allclose(sent, result["predicted"]))
    elif sys.argv[1] == "end":
        print("RESULT", tfdist.launch(end, strategy="single"))
    else:
        try:
            tfdist.launch(Refusing, strategy="single", log_dir=sys.argv[2] or None)
        except tfdist.ConfigError as error:
            print("ERROR", error)
        kept, = pathlib.Path(sys.argv[2]).glob("tfdist-launch-*.pkl")
        Refusing.open = True
        print("LOADED", pickle.loads(kept.read_bytes()))
"""


WRAPPED = """
import keras, tfdist

class Mine(keras.optimizers.SGD):
    pass

def train():
    import tfdist.horovod as hvd

    hvd.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(Mine(0.1)), "mse")
    assert type(model.optimizer) is not Mine
    return model

if __name__ == "__main__":
    print("OWN", type(tfdist.launch(train, strategy="single").optimizer) is Mine)
"""


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    (tmp_path / "custom.py").write_text(CUSTOM)
    return tmp_path


@pytest.mark.seldom  # As the result that cannot be loaded, below.
def test_a_model_of_the_programs_own_classes_comes_back(custom: Path) -> None:
    done = run(custom, sys.executable, "custom.py", "train")
    assert "OWN [True, True, True] True True" in done.stdout, done.stderr
    assert "SAME True" in done.stdout
    assert "SENT True" in done.stdout


def test_an_optimizer_in_that_of_horovod_comes_back_as_itself(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WRAPPED)
    done = run(tmp_path, sys.executable, "program.py")
    assert "OWN True" in done.stdout, done.stderr


@pytest.mark.parametrize("folder", ["logs", pytest.param("", marks=pytest.mark.seldom)])
def test_a_result_that_cannot_be_loaded_is_kept(custom: Path, folder: str) -> None:
    done = run(custom, sys.executable, "custom.py", "refuse", folder)
    expected = "ERROR The result of type Refusing cannot be loaded here: ValueError: not yet"
    assert expected in done.stdout, done.stderr
    assert "LOADED 7" in done.stdout, done.stderr
    (kept,) = (custom / folder).glob("tfdist-launch-*.pkl")
    assert f"It is kept in {str(kept.relative_to(custom))!r}" in done.stdout


@pytest.mark.seldom  # One that returns or fails is above.
def test_a_function_that_exits_returns_none(custom: Path) -> None:
    done = run(custom, sys.executable, "custom.py", "end")
    assert "RESULT None" in done.stdout, done.stderr


def test_modules_of_the_callers_own_path(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library/mine.py").write_text("def answer():\n    return 42\n")
    (tmp_path / "program.py").write_text(
        "import sys\nsys.path.append('library')\nimport mine, tfdist\n"
        "if __name__ == '__main__':\n"
        "    print('RESULT', tfdist.launch(mine.answer, strategy='single'))\n"
    )
    done = run(tmp_path, sys.executable, "program.py")
    assert "RESULT 42" in done.stdout, done.stderr


def test_an_option_that_is_false_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.toml").write_text('strategy = "multi_worker"\nreport = true\n')
    started: list[list[str]] = []

    def no_job(words: list[str]) -> tuple[int, str]:
        started.append(words)
        return 0, ""

    monkeypatch.setattr(tfdist.cli.launch, "_run", no_job)
    assert tfdist.launch(print, strategy=tmp_path / "s.toml", report=False, seed=1) is None
    assert started[0][:5] == ["--strategy", str(tmp_path / "s.toml"), "--no-report", "--seed", "1"]


def test_a_file_with_options_that_do_not_go_with_it(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('strategy = "single"\n')
    with pytest.raises(tfdist.ConfigError, match="conflicts with strategy='single'"):
        tfdist.launch(print, strategy=tmp_path / "s.toml", processes=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"processes": 0}, "processes=0 is not a whole number of 1 or more"),
        ({"devcies": 2}, "devcies"),
        ({"strategy": "miror"}, "miror"),
        ({"strategy": "nope.toml"}, "Cannot read the file 'nope.toml'"),
        ({"strategy": Path("nope.toml")}, "Cannot read the file 'nope.toml'"),
        ({"strategy": 5}, "strategy=5 is not text in quotes"),
        ({"zero": 3, "mode": "stale"}, "mode='stale'"),
        ({"function": 5}, "function=5 is not a function"),
        (
            {"args": (1, threading.Lock())},
            r"The argument args\[1\] of type lock cannot be sent to another process",
        ),
        (
            {"kwargs": {"end": threading.Lock()}},
            r"The argument kwargs\['end'\] of type lock cannot be sent",
        ),
    ],
)
def test_mistakes_are_named_before_anything_starts(options: dict, words: str) -> None:
    with pytest.raises(tfdist.ConfigError, match=words):
        tfdist.launch(**{"function": print, **options})


def test_a_launch_within_a_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_LAUNCHED", "1")
    with pytest.raises(tfdist.ConfigError, match="which has its processes already"):
        tfdist.launch(print)
