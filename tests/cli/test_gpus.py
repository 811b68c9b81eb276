"""A machine with GPUs that TensorFlow cannot use: said before a script trains on the CPU.

The GPUs are those of a program `nvidia-smi` that the test writes; TensorFlow is asked for real.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import environment

#: Each test waits for TensorFlow to start.
pytestmark = pytest.mark.slow

SECONDS = 120
GPUS = 97  # More than any machine has that runs this test.


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    lines = "".join(f"echo 'GPU {i}: Some GPU (UUID: {i})'\n" for i in range(GPUS))
    program.write_text(f"#!/bin/sh\n{lines}")
    program.chmod(0o755)
    (tmp_path / "train.py").write_text("print('it has trained')")
    return tmp_path


def tfdist(here: Path, *words: str, visible: str | None) -> subprocess.CompletedProcess[str]:
    path = f"{here / 'bin'}{os.pathsep}{environment.snapshot()['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "tfdist.cli.main", *words],
        env=environment.merged(
            {"PATH": path, "CUDA_VISIBLE_DEVICES": visible, "TF_CONFIG": None, "COLUMNS": "200"}
        ),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [("-s", "mirrored"), ("-s", "multi_worker", "-n", "2"), ("-s", "parameter_server", "-n", "1")],
    ids=lambda words: words[1],
)
def test_run_refuses_to_train_on_the_cpu_instead(here: Path, words: tuple[str, ...]) -> None:
    done = tfdist(here, "run", *words, "train.py", visible=None)
    assert done.returncode == 2, done.stderr
    assert "it has trained" not in done.stdout
    whose = "nvidia-smi lists" if words[1] == "mirrored" else "(this task's share of the GPUs here)"
    assert whose in done.stderr
    assert "and TensorFlow sees" in done.stderr
    assert "pip install 'tfdist[cuda]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [("-s", "multi_worker", "-n", "2", "--env-only"), ("-n", "2", "--every-task")],
    ids=lambda words: words[-1],
)
def test_run_refuses_to_start_scripts_by_themselves(here: Path, words: tuple[str, ...]) -> None:
    done = tfdist(here, "run", *words, "train.py", visible=None)
    assert done.returncode == 2, done.stderr
    assert "it has trained" not in done.stdout
    assert f"nvidia-smi lists {GPUS} GPUs, and TensorFlow sees" in done.stderr


def test_run_trains_on_the_cpu_where_that_is_chosen(here: Path) -> None:
    done = tfdist(here, "run", "-s", "mirrored", "train.py", visible="-1")
    assert done.returncode == 0, done.stderr
    assert "it has trained" in done.stdout


def test_doctor_compares_the_counts(here: Path) -> None:
    done = tfdist(here, "doctor", visible=None)
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert f"nvidia-smi lists {GPUS} GPUs, and TensorFlow sees" in said
    assert "pip install 'tfdist[cuda]'" in said


def test_a_driver_that_does_not_answer_is_named(here: Path) -> None:
    (here / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho no driver; exit 9\n")
    done = tfdist(here, "run", "-s", "mirrored", "train.py", visible=None)
    assert done.returncode == 0, done.stderr
    assert "nvidia-smi is there and fails (no driver), so the CPU is used" in done.stderr
    doctor = tfdist(here, "doctor", visible=None)
    assert "nvidia-smi is there and fails (no driver), so the CPU is used" in doctor.stdout
    chosen = tfdist(here, "run", "-s", "mirrored", "train.py", visible="-1")
    assert "nvidia-smi" not in chosen.stderr
