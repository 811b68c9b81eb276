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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"processes": 0}, "processes=0 is not a whole number of 1 or more"),
        ({"devcies": 2}, "devcies"),
        ({"strategy": "miror"}, "miror"),
        ({"args": (threading.Lock(),)}, "cannot be sent to another process"),
    ],
)
def test_mistakes_are_named_before_anything_starts(options: dict, words: str) -> None:
    with pytest.raises(tfdist.ConfigError, match=words):
        tfdist.launch(print, **options)


def test_a_launch_within_a_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_LAUNCHED", "1")
    with pytest.raises(tfdist.ConfigError, match="which has its processes already"):
        tfdist.launch(print)
