"""The programs of docs/gallery.md: each runs, and its result is what the page says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/gallery.md").read_text()
COMMANDS = re.findall(r"^    ((?:tfdist|python|sbatch) .+)$", PAGE, re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def run(folder: Path, command: str, status: int = 0) -> str:
    """The output of a command of the page, and that of a task that evaluates."""
    tool, *words = command.split()
    done = subprocess.run(
        [str(Path(sys.executable).with_name(tool)), *words],
        cwd=folder,
        env=environment.merged({"TF_CONFIG": None}),
        text=True,
        capture_output=True,
        timeout=280,
    )
    assert done.returncode == status, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    logs = sorted(folder.glob("tfdist-logs/*/evaluator-0.log"))
    return done.stdout + "".join(path.read_text() for path in logs)


def number(pattern: str, printed: str) -> float:
    (found,) = re.findall(pattern, printed)
    return float(found)


def check_digits(printed: str) -> None:
    assert number(r"validation accuracy (\d+\.\d+)%", printed) >= 97


def check_text(printed: str) -> None:
    assert number(r"(\d+\.\d+) bits a letter", printed) < 4


def check_llama(printed: str) -> None:
    assert "'The statement" in printed
    assert number(r"(\d+\.\d+) bits a letter", printed) < 3.6


def check_recommender(printed: str) -> None:
    assert number(r"AUC on held-out ratings (\d\.\d+)", printed) > 0.85


def check_gan(printed: str) -> None:
    assert number(r"mean drawing (\d\.\d+) from", printed) < 0.2
    assert 0.7 < number(r"spread (\d\.\d+) of theirs", printed) < 1.3


def check_tables(printed: str) -> None:
    assert "accuracy" in printed


def check_loop(printed: str) -> None:
    assert number(r"accuracy on unseen digits (\d+\.\d+)%", printed) > 90


def check_devices(printed: str) -> None:
    assert "weights on 2 devices" in printed


def check_resumable(printed: str) -> None:
    assert number(r"after (\d+) updates", printed) == 132
    assert number(r"accuracy on unseen digits (\d+\.\d+)%", printed) > 85


CHECKS = {
    "digits.py": check_digits,
    "language_model.py": check_text,
    "kerashub_llama.py": check_llama,
    "recommender.py": check_recommender,
    "gan.py": check_gan,
    "estimator_wide_and_deep.py": check_tables,
    "custom_loop.py": check_loop,
    "two_devices.py": check_devices,
    "resumable.py": check_resumable,
}


def script_of(command: str) -> str:
    (script,) = re.findall(r"examples/(\w+\.py)", command)
    return script


# The small runs below and tests/jobs/test_readme.py cover the same programs.
@pytest.mark.seldom
@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith("sbatch")])
def test_a_command_of_the_gallery_ends_as_the_page_says(folder, command):
    CHECKS[script_of(command)](run(folder, command))


def test_each_program_is_on_the_page_and_each_command_is_checked():
    shown = {script_of(command) for command in COMMANDS}
    assert shown == set(CHECKS)
    # Those on pages of their own: docs/estimator.md and docs/parameter_server.md.
    others = {"estimator_digits.py", "estimator_keras.py", "legacy_between_graph.py"}
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == shown | others


def test_two_optimizers_and_a_train_step_on_two_devices(folder):
    printed = run(folder, "tfdist run --strategy mirrored -n 2 examples/gan.py --epochs 1")
    assert "mean drawing" in printed


@pytest.mark.seldom  # tests/keras/test_mesh.py: the same layers, small.
def test_a_llama_in_parts_writes_what_a_whole_one_writes(folder):
    small = "examples/kerashub_llama.py --steps 12 --width 32 --length 32"
    results = [
        run(folder, f"tfdist run {options} {small} {parts}").splitlines()[-2:]
        for options, parts in (("", ""), ("--strategy multi_worker -n 2", "--parts 2"))
    ]
    assert results[0] == results[1]
    assert "'The statement" in results[0][0]


def epochs(printed: str) -> list[float]:
    """The loss of each epoch that `fit` has printed."""
    return [
        float(re.findall(r"loss: (\d+\.\d+)", each)[-1]) for each in printed.split("Epoch ")[1:]
    ]


@pytest.mark.seldom
def test_a_language_model_in_parts_learns_as_a_whole_one(folder):
    small = "examples/language_model.py --steps 4 --epochs 2 --length 16 --width 128 --blocks 1"
    alone = run(folder, f"tfdist run {small}")
    for parts in ("--zero 3", "--mesh model=2"):
        printed = run(folder, f"tfdist run --strategy multi_worker -n 2 {parts} {small}")
        assert len(epochs(printed)) == 2
        assert epochs(printed) == pytest.approx(epochs(alone), abs=2e-4)
        assert number(r"(\d+\.\d+) bits", printed) == number(r"(\d+\.\d+) bits", alone)


@pytest.mark.seldom  # tests/servers/test_sparse.py has tables on servers.
def test_tables_on_servers(folder):
    small = "--rows 20000 --visitors 300 --films 100 --ratings 30000 --batch-size 512 --epochs 5"
    command = COMMANDS[[script_of(c) for c in COMMANDS].index("recommender.py") + 1]
    assert "parameter_server" in command
    check_recommender(run(folder, f"{command} {small}"))


@pytest.mark.seldom  # tests/keras/test_callbacks.py has backups.
def test_a_training_that_is_ended_goes_on_at_its_backup(folder):
    """Two runs, of which the first loses its power, come to what one run comes to."""
    alone = run(folder, "tfdist run --seed 1 examples/resumable.py --backup other")
    check_resumable(alone)
    job = "tfdist run --seed 1 --strategy multi_worker -n 2 examples/resumable.py"
    run(folder, f"{job} --lose-power-at 50", status=75)
    assert (folder / "resumable-backup").is_dir()
    printed = run(folder, job)
    assert printed.count("Epoch ") == 5  # Its first epoch is the second, in which it was ended.
    last = r"accuracy on unseen digits.*"
    assert re.findall(last, printed) == re.findall(last, alone)
    assert not (folder / "resumable-backup").exists()
