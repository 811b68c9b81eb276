"""`tfdist run`: what it prints, what it hands to the script, and what it says to mistakes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tfdist import environment
from tfdist.cli.request import file_of
from tfdist.errors import ConfigError

SHOW = "import os, sys; print(sys.argv[1:], os.environ.get('TF_CONFIG', 'none'))"
CLEAN = {"TF_CONFIG": None, "CUDA_VISIBLE_DEVICES": "-1", "COLUMNS": None}
TASK = {"type": "worker", "index": 1}
SECONDS = 60


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SHOW)
    return tmp_path


def tfdist(*words: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tfdist.cli.main", *words],
        env=environment.merged({**CLEAN, **variables}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def mistake(*words: str, **variables: str | None) -> str:
    """The message of a call that is a mistake: short, no trace, nothing started."""
    result = tfdist(*words, **variables)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert not Path("tfdist-logs").exists()
    assert result.stderr.startswith("tfdist: ")
    return " ".join(result.stderr.split())


def test_dry_run_prints_what_can_be_pasted(here: Path) -> None:
    result = tfdist("run", "--dry-run", "-n", "2", "--env-only", "train.py", "a b", "--seed=1")
    assert result.returncode == 0
    assert not Path("tfdist-logs").exists()
    headers = re.findall(r"^# (worker \d) at 127.0.0.1:\d+, log: (.*)$", result.stdout, re.M)
    assert [name for name, _ in headers] == ["worker 0", "worker 1"]
    assert "# Paste each task's command into a shell of its own" in result.stdout
    common, *tasks = re.split(r"^(?=# worker \d)", result.stdout, flags=re.MULTILINE)
    assert len(tasks) == 2
    for index, task in enumerate(tasks):
        shell = ["sh", "-c", common + task]
        pasted = subprocess.run(shell, capture_output=True, text=True, timeout=SECONDS, check=True)
        assert pasted.stdout.startswith("['a b', '--seed=1'] {")
        own = json.loads(pasted.stdout.partition("] ")[2])["task"]
        assert own == {"index": index, "type": "worker"}


def test_dry_run_shows_the_whole_environment(here: Path) -> None:
    result = tfdist("run", "--dry-run", "--seed", "5", "train.py", TF_CPP_MIN_LOG_LEVEL=None)
    words = shlex.split(result.stdout.replace("\\\n", ""), comments=True)
    assert words[0] == "env"
    assert "a shell of its own" not in result.stdout
    assert {"TFDIST_SEED=5", "TFDIST_LAUNCHED=1", "TF_CPP_MIN_LOG_LEVEL=2"} < set(words)
    assert words[-3:] == ["-m", "tfdist.cli.task", "train.py"]


def test_the_environment_of_all_tasks_is_shown_once(here: Path) -> None:
    text = tfdist("run", "--dry-run", "-s", "multi_worker", "-n", "3", "train.py").stdout
    common, *tasks = re.split(r"^# worker \d.*$", text, flags=re.MULTILINE)
    assert common.startswith(
        "# Paste each task's command into a shell of its own, after the function common.\n"
        "# The environment of all tasks\n"
    )
    assert "TFDIST_CONFIG=" in common
    assert len(tasks) == 3
    for task in tasks:
        words = shlex.split(task.replace("\\\n", ""))
        assert words[:2] == ["common", "env"]
        assert [word.partition("=")[0] for word in words[2:-4]] == ["TFDIST_RECORD", "TF_CONFIG"]
        assert words[-3:] == ["-m", "tfdist.cli.task", "train.py"]


def test_a_dry_run_for_programs(here: Path) -> None:
    words = ("-s", "parameter_server", "-n", "2", "--log-dir", "logs", "train.py", "a b")
    result = tfdist("run", "--dry-run", "--json", *words)
    plan = json.loads(result.stdout)
    assert (plan["strategy"], plan["options"]["processes"], plan["log_dir"]) == (
        *("parameter_server", 2, "logs"),
    )
    assert plan["reasons"]["processes"] == "-n"
    chief, first, _, ps = plan["tasks"]
    assert [each["type"] for each in plan["tasks"]] == ["chief", "worker", "worker", "ps"]
    assert chief["command"][-3:] == ["tfdist.cli.task", "train.py", "a b"]
    assert chief["environ"]["TFDIST_SEED"] == str(plan["seed"])
    assert json.loads(ps["environ"]["TF_CONFIG"])["cluster"]["worker"][0] == first["address"]
    assert ps["log"] == "logs/ps-0.log"
    alone = json.loads(tfdist("run", "--dry-run", "--json", "-s", "single", "train.py").stdout)
    (task,) = alone["tasks"]
    assert task["address"] is task["host"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--json"], "Add --dry-run, or leave it out"),
        (["--json", "--dry-run", "--on", "slurm"], "--json conflicts with --on slurm"),
    ],
)
def test_a_plan_as_json_needs_a_dry_run(here: Path, words: list[str], said: str) -> None:
    assert said in mistake("run", *words, "train.py")


def test_everything_after_the_script_is_the_scripts(here: Path) -> None:
    theirs = ["-n", "7", "--strategy", "x", "--help", "--", "--dry-run"]
    result = tfdist("run", "--env-only", "train.py", *theirs)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{theirs} none\n"


@pytest.mark.parametrize("words", [[], ["--env-only"]])
@pytest.mark.parametrize("name", ["program.sub.train", "program.sub"])
def test_a_module(here: Path, words: list[str], name: str) -> None:
    package = here / "program/sub"
    package.mkdir(parents=True)
    (here / "program/values.py").write_text("SEVEN = 7")
    text = "import sys\nfrom ..values import SEVEN\nprint(__name__, SEVEN, sys.argv[1:])"
    for file in ("train.py", "__main__.py"):
        (package / file).write_text(text)
    result = tfdist("run", *words, "-m", name, "--epochs", "3")
    assert "__main__ 7 ['--epochs', '3']" in result.stdout, result.stderr


def test_a_package_that_cannot_be_run_is_named_as_it_was_typed(here: Path) -> None:
    (here / "program/sub").mkdir(parents=True)
    said = mistake("run", "-m", "program.sub")
    assert "-m program.sub names a package, of which `python -m` runs the module __main__" in said
    assert "such as program.sub.train, or add program/sub/__main__.py." in said


def test_a_module_that_no_folder_of_the_path_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --editable` leaves a finder for the package."""
    (tmp_path / "train.py").write_text(SHOW)
    spec = ModuleSpec("edited", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return spec if name == "edited" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert file_of("edited.train") == str(tmp_path / "train.py")
    with pytest.raises(ConfigError, match=r"There is no module 'edited\.other'"):
        file_of("edited.other")


def test_a_run_is_shown_and_logged(here: Path) -> None:
    result = tfdist("run", "--env-only", "-n", "3", "--seed", "9", "train.py")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    for words in (
        "multi_worker (auto: 3 processes were asked for)",
        "worker 0 at 127.0.0.1:",
        "3 (1 in each of 3 tasks)",
    ):
        assert words in result.stderr
    assert re.search(r"^tfdist: done in \d+ s; logs: tfdist-logs/", result.stderr, re.MULTILINE)
    logs = Path("tfdist-logs/latest")
    names = ["launcher.jsonl", *(f"worker-{i}.log" for i in range(3))]
    assert sorted(each.name for each in logs.iterdir()) == names
    assert '"index": 2' in (logs / "worker-2.log").read_text()


def test_the_exit_status_and_last_lines_of_a_failure(here: Path) -> None:
    Path("train.py").write_text(
        "import json, os, sys, time\n"
        "if json.loads(os.environ['TF_CONFIG'])['task']['index'] == 1: sys.exit(5)\n"
        "time.sleep(60)"
    )
    result = tfdist("run", "--env-only", "-n", "2", "--log-dir", "logs", "train.py")
    assert result.returncode == 5
    assert (
        "tfdist: worker 1 failed with exit status 5.\nIts log: logs/worker-1.log" in result.stderr
    )
    assert "Traceback" not in result.stderr


WRONG_SHAPE = """
import keras, numpy as np
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
def train():
    model.fit(np.ones((8, 5)), np.ones((8, 1)), verbose=0)
train()
"""


def test_a_traceback_has_the_programs_frames_only(here: Path) -> None:
    Path("train.py").write_text(WRONG_SHAPE)
    result = tfdist("run", "-s", "mirrored", "-n", "2", "train.py")
    assert result.returncode == 1
    _, _, trace = result.stderr.partition("Traceback (most recent call last):")
    files = re.findall(r'File "(.*)", line (\d+)', trace)
    assert files[:2] == [("train.py", "7"), ("train.py", "6")]
    assert not [file for file, _ in files if "/tfdist/" in file or "runpy" in file]
    assert "expected axis -1 of input shape to have value 4" in trace


@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"]])
def test_a_mistake_of_syntax_is_shown_as_python_shows_it(here: Path, words: list[str]) -> None:
    Path("train.py").write_text("x = 1\n\nif x\n    pass\n")
    result = tfdist("run", *words)
    assert result.returncode == 1
    files = re.findall(r'File "(.*)", line (\d+)', result.stderr)
    assert [(Path(file).name, line) for file, line in files] == [("train.py", "3")]
    assert "SyntaxError: expected ':'" in result.stderr


def test_one_task_of_a_cluster_that_tf_config_names(here: Path) -> None:
    config = json.dumps(
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    )
    result = tfdist("run", "--env-only", "train.py", TF_CONFIG=config)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"[] {config}\n"
    assert "worker 1 at b:1 (this one)" in result.stderr
    assert "auto: TF_CONFIG is set" in result.stderr
    assert Path("tfdist-logs/latest/worker-1.log").exists()
    said = mistake_in(config, "-n", "3")
    assert "-n 3 conflicts with TF_CONFIG, whose cluster has 2 tasks" in said


def mistake_in(config: str, *words: str) -> str:
    result = tfdist("run", *words, "train.py", TF_CONFIG=config)
    assert result.returncode == 2
    return " ".join(result.stderr.split())


def test_all_tasks_of_a_cluster_come_to_one_configuration(here: Path) -> None:
    """Each is started by its own command, and the identities are compared at the start."""
    outputs = []
    for index, words in enumerate((["-n", "2"], ["--strategy", "multi_worker"])):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": task})
        outputs.append(tfdist("run", "--dry-run", *words, "train.py", TF_CONFIG=config).stdout)
    first, second = (re.findall(r"TFDIST_(?:CONFIG|SEED)=.*", text) for text in outputs)
    assert first == second
    assert len(first) == 1, "without --seed the chief's seed is given to all when they join"


def test_one_process_does_not_see_a_tf_config(here: Path) -> None:
    result = tfdist("run", "--env-only", "-s", "single", "train.py", TF_CONFIG='{"cluster": {}}')
    assert result.stdout == "[] none\n"


def test_n_counts_the_devices_of_mirrored(here: Path) -> None:
    result = tfdist("run", "--dry-run", "-s", "mirrored", "-n", "2", "train.py")
    assert '"devices": 2' in result.stdout
    assert result.stdout.count("# worker") == 1
    Path("two.toml").write_text('strategy = "mirrored"\n')
    assert (
        '"devices": 2' in tfdist("run", "--dry-run", "-s", "two.toml", "-n", "2", "train.py").stdout
    )
    said = mistake("run", "-s", "mirrored", "-n", "2", "--devices", "3", "train.py")
    assert "-n 2 conflicts with --devices 3" in said


def test_a_task_that_knows_a_part_of_its_cluster(here: Path) -> None:
    own = {"worker": {}, "ps": ["127.0.0.1:2"]}
    server = json.dumps({"cluster": own, "task": {"type": "ps", "index": 0}})
    done = tfdist("run", "--every-task", "train.py", TF_CONFIG=server)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[] {server}\n"
    shutil.rmtree("tfdist-logs")
    config = json.dumps({"sparseCluster": {"worker": {"1": "b:1"}, "ps": None}, "task": TASK})
    said = mistake("run", "-s", "multi_worker", "train.py", TF_CONFIG=config)
    assert "TF_CONFIG lists worker 1 but not worker 0, and strategy='multi_worker' needs" in said
    done = tfdist("run", "--every-task", "train.py", TF_CONFIG=config)
    assert done.returncode == 0, done.stderr


def test_a_strategy_file(here: Path) -> None:
    Path("two.toml").write_text('strategy = "multi_worker"\nprocesses = 2\n')
    assert tfdist("run", "--dry-run", "-s", "two.toml", "train.py").stdout.count("# worker") == 2
    more = tfdist("run", "--env-only", "-s", "two.toml", "-n", "3", "train.py")
    assert more.returncode == 0, more.stderr
    assert "3 (1 in each of 3 tasks)" in more.stderr
    assert "-n 3 instead of the file's 2" in more.stderr
    config = json.dumps({"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": TASK})
    shutil.rmtree("tfdist-logs")
    assert "processes=2 of two.toml conflicts with TF_CONFIG, whose cluster has 3 tasks" in mistake(
        "run", "-s", "two.toml", "train.py", TF_CONFIG=config
    )
    Path("two.toml").write_text(
        'strategy = "mirrored"\nreport = true\nmode = "local"\nperiod = 2\n'
    )
    plan = ("run", "--dry-run", "-s", "two.toml", "--no-report", "--mode", "sync", "train.py")
    assert '"report": false' in tfdist(*plan).stdout
    Path("two.toml").write_text("proceses = 2\n")
    assert "Did you mean 'processes'?" in mistake("run", "-s", "two.toml", "train.py")
    assert "no.toml" in mistake("run", "-s", "no.toml", "train.py")


def test_a_picture_without_matplotlib_is_refused_before_the_training(here: Path) -> None:
    absent = here / "absent" / "matplotlib"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ModuleNotFoundError('matplotlib')")
    others = environment.snapshot().get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(absent.parent), others]))
    words = ("-s", "pipeline", "-n", "2", "--timeline", "step.png", "train.py")
    assert "pip install 'tfdist[pictures]'" in mistake("run", *words, PYTHONPATH=path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian.py"], "The script 'trian.py' does not exist in .* Did you mean 'train.py'?"),
        (["no/where.py"], "The script 'no/where.py' does not exist"),
        (["."], r"The script '\.' is a directory. Give a Python file. It has: train.py"),
        (["-n", "0", "train.py"], "-n 0 starts no process"),
        (["-n", "-1", "train.py"], "-n -1 starts no process"),
        (["-n", "two", "train.py"], "Invalid value for '-n' / '--processes'"),
        (["--strategy", "multiworker", "train.py"], "'multiworker'. Did you mean 'multi_worker'?"),
        (["--strateg", "single", "train.py"], "No such option.*--strategy"),
        (["--mode", "asink", "train.py"], "asink"),
        (["-s", "single", "-n", "2", "train.py"], "-n 2 conflicts with --strategy single"),
        (["-n", "9999999", "train.py"], "9999999 tasks on this machine are more than the 4096"),
        (["--start-timeout", "0", "train.py"], "--start-timeout 0.0 is not a number above 0"),
        (["--seed", "-3", "train.py"], "--seed -3"),
        ([], r"^tfdist: Missing argument 'SCRIPT'\. `.* run --help` shows what there is\.$"),
        (["--log-dir", "train.py", "train.py"], "--log-dir 'train.py' cannot be written"),
        (
            ["--max-np", "2", "--log-dir", "train.py", "train.py"],
            "The state of an elastic job in 'train.py' cannot be written: .* Give a .* --log-dir",
        ),
        (
            ["-s", "pipeline", "-n", "2", "--timeline", "train.py/step.json", "train.py"],
            "--timeline train.py/step.json cannot be written: Not a directory",
        ),
        (
            ["-s", "pipeline", "--devices", "2", "--timeline", ".", "train.py"],
            r"--timeline \. cannot be written: Is a directory. It is a directory: name a file",
        ),
        (
            ["-s", "horovod", "-n", "2", "--timeline", "none/step.json", "train.py"],
            "--timeline none/step.json cannot be written: No such file or directory",
        ),
    ],
)
def test_mistakes_are_explained(here: Path, words: list[str], said: str) -> None:
    assert re.search(said, mistake("run", *words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--fast"],
            r"^tfdist: No such option: --fast\. `.*tfdist.* --help` shows what there",
        ),
        (["runn"], r"^tfdist: No such command 'runn'\. Did you mean 'run'\? `"),
    ],
)
def test_a_mistake_before_the_command_is_explained_as_others_are(
    here: Path, words: list[str], said: str
) -> None:
    assert re.search(said, mistake(*words))


def test_too_few_gpus_are_an_error(here: Path) -> None:
    said = mistake("run", "-n", "3", "train.py", CUDA_VISIBLE_DEVICES="0,1")
    assert "this machine has 2 GPUs to give" in said


def test_a_directory_that_cannot_be_written_moves_the_logs(here: Path) -> None:
    Path("tfdist-logs").write_text("a file is in the way")
    result = tfdist("run", "--env-only", "train.py", TMPDIR=str(here))
    assert result.returncode == 0, result.stderr
    assert "Cannot write logs to 'tfdist-logs/" in result.stderr
    assert list(here.glob("tfdist-logs-*/worker-0.log"))


def test_the_launcher_does_not_load_tensorflow(here: Path) -> None:
    code = (
        "import sys; from tfdist.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: print('tensorflow' in sys.modules, 'keras' in sys.modules)"
    )
    for words in (
        ["run", "--help"],
        ["run", "--dry-run", "train.py"],
        ["run", "--env-only", "train.py"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            env=environment.merged(CLEAN),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == "False False"


def test_version() -> None:
    result = tfdist("--version")
    assert result.returncode == 0
    assert re.match(r"tfdist \S+\ntensorflow \S+\nkeras \S+\n$", result.stdout)
