"""`tfdist init`: what it writes, and that it overwrites nothing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tfdist.cli.main import app
from tfdist.config.strategy_config import accepted

ROOT = Path(__file__).parents[2]
ALWAYS = {"train.py", "strategy.toml", "README.md"}
ADDED = {
    "--slurm": {"train.sbatch"},
    "--kubernetes": {"kubernetes.yaml", "Dockerfile"},
    "--ssh": {"hosts"},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)


def tfdist(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def init(*words: str) -> set[str]:
    """The names of the files that it writes into the directory `a b`."""
    done = tfdist("init", "a b", *words)
    assert done.exit_code == 0, done.output
    names = {path.name for path in Path("a b").iterdir()}
    for name in names:
        assert name in done.stdout
    return names


@pytest.mark.parametrize("flag", ADDED)
def test_the_files_of_a_purpose(flag: str) -> None:
    assert init(flag) == ALWAYS | ADDED[flag]


def test_the_flags_go_together_and_the_readme_names_each_file() -> None:
    assert init(*ADDED) == ALWAYS.union(*ADDED.values())
    readme = Path("a b/README.md").read_text()
    for name in ADDED["--slurm"] | ADDED["--ssh"] | {"kubernetes.yaml", "train.py"}:
        assert name in readme


def test_without_a_flag_the_readme_names_no_cluster() -> None:
    assert init() == ALWAYS
    assert "##" not in Path("a b/README.md").read_text()


def test_the_commands_of_the_readme_are_well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    init(*ADDED)
    monkeypatch.chdir("a b")
    commands = re.findall(r"^    tfdist (run .+)$", Path("README.md").read_text(), re.MULTILINE)
    comments = re.findall(r"^#     tfdist (.+)$", Path("kubernetes.yaml").read_text(), re.MULTILINE)
    assert (len(commands), len(comments)) == (4, 1)
    for command in commands + comments:
        done = tfdist(*shlex.split(command.replace("run ", "run --dry-run ", 1)))
        assert done.exit_code == 0, (command, done.output)


def test_every_commented_option_is_one() -> None:
    init()
    text = Path("a b/strategy.toml").read_text()
    assert tomllib.loads(text) == {"strategy": "multi_worker", "processes": 2}
    commented = tomllib.loads("\n".join(re.findall(r"^# (\w+ = .*)$", text, re.MULTILINE)))
    assert {"mode", "devices", "start_timeout"} < set(commented)
    for name, value in commented.items():
        assert accepted(name, value) == value
    assert "# When a gradient becomes an update: sync, stale, local.\n" in text


def test_the_batch_script_is_one_for_bash_and_asks_for_two_tasks() -> None:
    init("--slurm")
    path = Path("a b/train.sbatch")
    subprocess.run(["bash", "-n", path], check=True, timeout=10)
    assert "\n#SBATCH --ntasks=2\n" in path.read_text()
    assert "\n#SBATCH --job-name=a-b\n" in path.read_text()


@pytest.mark.parametrize("name", ["train.py", "hosts", "README.md"])
def test_nothing_is_written_if_a_file_exists(name: str) -> None:
    Path("first").mkdir()
    Path("first", name).write_text("mine")
    done = tfdist("init", "first", "--ssh")
    assert done.exit_code == 2
    assert f"'first/{name}' exists" in done.stderr
    assert [path.read_text() for path in Path("first").iterdir()] == ["mine"]


def test_a_directory_that_cannot_be_made() -> None:
    Path("file").touch()
    done = tfdist("init", "file/sub")
    assert done.exit_code == 2
    assert "The directory 'file/sub' cannot be written" in done.stderr


def written(*names: str) -> set[str]:
    """The files below the directory `mine` after examples have been written there."""
    flags = [word for name in names for word in ("--example", name)]
    done = tfdist("init", "mine", *flags)
    assert done.exit_code == 0, done.output
    files = {str(path.relative_to("mine")) for path in Path("mine").rglob("*.*")}
    return files


def test_an_example_comes_with_its_data_and_in_the_folder_that_its_commands_name() -> None:
    gan = {"examples/gan.py", "examples/digits.csv.gz"}
    assert written("gan.py") == gan
    assert "    tfdist run examples/gan.py\n" in Path("mine/examples/gan.py").read_text()
    more = {"strategies/stale.toml", "cluster/mpirun.sh", "examples/custom_loop.py"}
    assert written(*map(os.path.basename, sorted(more))) == gan | more
    assert os.access("mine/cluster/mpirun.sh", os.X_OK)


@pytest.mark.parametrize("folder", ["examples", "strategies", "cluster"])
def test_all_examples_of_a_folder(folder: str) -> None:
    of_repository = {f"{folder}/{path.name}" for path in (ROOT / folder).glob("*.*")}
    assert written(folder) == of_repository
    told = " ".join(tfdist("init", "--help").stdout.replace("│", " ").split())
    for name in map(os.path.basename, of_repository):
        assert name.endswith((".gz", ".md")) or f" {name}" in told


def test_an_example_that_there_is_not_and_what_does_not_go_with_one() -> None:
    done = tfdist("init", "mine", "--example", "gan")
    assert done.exit_code == 2
    assert "Unknown --example 'gan'. Did you mean 'gan.py'? There are: examples, " in done.stderr
    done = tfdist("init", "mine", "--example", "gan.py", "--image", "i")
    assert done.exit_code == 2
    assert (
        "--image adds to the files of a first job, in whose place --example gan.py" in done.stderr
    )
    assert not Path("mine").exists()


def test_no_example_overwrites_a_file() -> None:
    Path("mine/examples").mkdir(parents=True)
    Path("mine/examples/digits.csv.gz").write_text("mine")
    done = tfdist("init", "mine", "--example", "gan.py")
    assert done.exit_code == 2
    assert "'mine/examples/digits.csv.gz' exists" in done.stderr
    assert [path.name for path in Path("mine").rglob("*.*")] == ["digits.csv.gz"]


def test_an_image_goes_with_a_manifest() -> None:
    done = tfdist("init", "first", "--image", "my/image")
    assert done.exit_code == 2
    assert "--image my/image names the container image of --kubernetes" in done.stderr
    assert not Path("first").exists()
    assert tfdist("init", "first", "--kubernetes", "--image", "my/image").exit_code == 0
    assert "image: my/image\n" in Path("first/kubernetes.yaml").read_text()
