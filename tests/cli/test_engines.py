"""`tfdist run --on ENGINE`: which engine is meant, and what each task's command line becomes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tfdist.cli.main import app

HERE = ["--dry-run", "--strategy", "multi_worker", "-n", "2"]


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["run", *words])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "pbs"], "Unknown engine --on 'pbs'. There are: local, ssh, slurm"),
        (["--on", "ssh"], "--on ssh needs the machines: add --hosts"),
        (["--on", "local", "--hosts", "a:2"], "--on local conflicts with --hosts"),
        (["--image", "i"], "--image goes with --on kubernetes. Add that"),
        (["--on", "mpi", "--image", "i"], "--image goes with --on kubernetes"),
        (["--on", "local", "--gpus-per-task", "1"], "goes with --on slurm or kubernetes or ray"),
        (["--on", "mpi", "--max-restarts", "2"], "--max-restarts 2 conflicts with --on mpi"),
        (["--on", "slurm", "--max-np", "2"], "--max-np conflicts with --on slurm"),
        (["--on", "slurm", "--env-only"], "which --env-only and --every-task leave without"),
        (["--on", "mpi", "--engine-args", "a 'b"], "cannot be split into words"),
        (["--on", "mpi", "--hosts", "a:1"], "-n 2 is more than the 1 slots of the hosts a:1"),
    ],
)
def test_what_does_not_go_together_is_told(words: list[str], message: str) -> None:
    status, said = run(*HERE, *words, "train.py")
    assert status == 2
    assert message in " ".join(said.split())


def test_mpi_gets_the_command_line_again() -> None:
    words = ["--strategy", "horovod", "-n", "3", "--autotune", "--fusion-mb", "4", "--seed", "7"]
    engine = ["--on", "mpi", "--hosts", "a:2,b:2", "--engine-args", "--bind-to none", "--dry-run"]
    status, said = run(*words, *engine, "train.py", "--epochs", "3", "--on", "its own")
    assert status == 0
    command = shlex.split(said)
    assert command[:7] == ["mpirun", "-np", "3", "--host", "a:2,b:2", "--bind-to", "none"]
    assert command[8:] == [
        *("-m", "tfdist.cli.main", "run", "--environment", "mpi", "--strategy", "horovod"),
        *("--fusion-mb", "4.0", "--autotune", "--seed", "7"),
        *("train.py", "--epochs", "3", "--on", "its own"),
    ]


def test_parameter_servers_count_as_tasks() -> None:
    status, said = run(
        *("--strategy", "parameter_server", "-n", "2", "--ps", "2", "--mode", "async"),
        *("--on", "mpi", "--dry-run", "train.py"),
    )
    assert status == 0
    words = shlex.split(said)
    assert words[:3] == ["mpirun", "-np", "5"]
    assert words[-3:] == ["--ps", "2", "train.py"]
    assert "async" in words


@pytest.mark.parametrize(("module", "name"), [("program.train", "train"), ("program", "program")])
def test_a_job_is_called_as_its_module(module: str, name: str) -> None:
    Path("program").mkdir()
    for file in ("train.py", "__main__.py"):
        Path("program", file).write_text("")
    for words, line in (
        (("--on", "slurm"), f"#SBATCH --job-name={name}"),
        (("--on", "kubernetes", "--image", "i"), f"  name: {name}"),
    ):
        status, said = run(*HERE, *words, "-m", module)
        assert status == 0, said
        assert line in said.splitlines()


def test_mpirun_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, said = run("--strategy", "multi_worker", "-n", "2", "--on", "mpi", "train.py")
    assert status == 2
    assert "--on mpi needs mpirun, which is not in PATH" in " ".join(said.split())


def test_a_number_of_processes_that_wins_over_the_file_goes_to_the_tasks() -> None:
    Path("s.toml").write_text('strategy = "multi_worker"\nprocesses = 2\n')
    for words, told in ((["-n", "3"], ["--processes", "3"]), ([], [])):
        status, said = run("-s", "s.toml", *words, "--on", "mpi", "--dry-run", "train.py")
        assert status == 0, said
        assert shlex.split(said)[-3 - len(told) :] == ["--strategy", "s.toml", *told, "train.py"]
