"""`tfdist config`: its texts, its words, and that the examples of the documentation are true."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tfdist.cli.config import config
from tfdist.cluster.environments.detection import ENVIRONMENTS
from tfdist.cluster.spec import Task
from tfdist.cluster.tf_config import parse_tf_config
from tfdist.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[2]

app = typer.Typer()
app.command()(config)

#: Nothing of a scheduler that runs the tests may show.
MARKS = r"(TF_CONFIG|CLUSTER_SPEC|RANK|WORLD_SIZE|(SLURM|LSB|LSF|SM|RAY|PMI|OMPI|HOROVOD|JSM)_.*)"


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfdist import environment

    for name in environment.snapshot():
        if re.fullmatch(MARKS, name):
            monkeypatch.delenv(name)


def run(*arguments: str, **environ: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "150", "NO_COLOR": "1", **environ})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run(*arguments, **environ)
    return str(caught.value)


def tasks(output: str) -> list[str]:
    return [str(parse_tf_config(line)[1]) for line in output.splitlines()]


def test_one_line_of_json_for_each_task() -> None:
    output = run("--hosts", "a:2,b", "--ps", "1", "--chief")
    assert tasks(output) == ["chief 0", "worker 0", "ps 0"]
    cluster = parse_tf_config(output.splitlines()[2])[0]
    assert cluster.as_dict() == {"chief": ["a:2222"], "worker": ["a:2223"], "ps": ["b:2222"]}


def test_a_file_of_hosts(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two\na slots=2\n[::1]:1\n")
    output = run("--hostfile", str(path), "--port", "5000", "--evaluator")
    assert tasks(output) == ["worker 0", "worker 1", "evaluator 0"]
    assert '"evaluator": ["[::1]:5000"]' in output


def test_whole_addresses() -> None:
    output = run(
        *("--worker", "a:1,b:2", "--worker", "c:3", "--ps-host", "[::1]:4"),
        *("--chief-host", "d:5", "--evaluator-host", "e:6"),
    )
    assert tasks(output) == ["chief 0", *(f"worker {i}" for i in range(3)), "ps 0", "evaluator 0"]
    assert json.loads(output.splitlines()[0])["cluster"]["ps"] == ["[::1]:4"]


def test_one_task() -> None:
    output = run("--hosts", "a:3", "--task", "worker:1")
    assert parse_tf_config(output)[1] == Task("worker", 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["No cluster is described", "--hosts a:2,b:2"]),
        (["--hosts", "a", "--worker", "b:1"], ["--hosts and --worker describe", "twice"]),
        (["--hosts", "a", "--hostfile", "h"], ["--hosts and --hostfile describe"]),
        (["--worker", "a:1", "--ps", "1"], ["--worker gives whole addresses", "--ps-host"]),
        (["--worker", "a:1", "--port", "1"], ["--port go with --hosts"]),
        (["--worker", "a"], ['"a" has no port']),
        (["--worker", "a:1,a:1"], ['"a:1" is the address of worker 0, worker 1']),
        (["--ps-host", "a:1"], ["no task that computes"]),
        (["--chief-host", "a:1,b:1"], ["There are 2 chiefs"]),
        (["--hosts", "a:2", "--ps", "2"], ["ps=2 of --hosts a:2 tasks leave none"]),
        (["--hosts", "a:2222"], ["--hosts 'a:2222'", "--port"]),
        (["--hosts", "a:2", "--port", "65535"], ["port=65535 leaves no ports for the 2 tasks"]),
        (["--hosts", "a", "--port", "0"], ["port=0 is not a port"]),
        (["--hostfile", "nowhere"], ["'nowhere' cannot be read"]),
        (["--hosts", "a:2", "--task", "worker:2"], ["--task worker:2", "worker:0 to worker:1"]),
        (["--hosts", "a:2", "--task", "0"], ["--task 0 is not a task"]),
        (["--hosts", "a", "--environment", "slurm"], ["Add --detect"]),
        (["--detect", "--hosts", "a"], ["--hosts describes another cluster"]),
        (["--detect", "--task", "worker:0"], ["--task worker:0 conflicts with --detect"]),
        (["--detect", "--environment", "slrum"], ["environment='slrum' does not exist"]),
        (["--detect", "--format", "json"], ["by local", "no variable tells the addresses"]),
    ],
)
def test_a_mistake_is_explained(arguments: list[str], words: list[str]) -> None:
    message = refused(*arguments)
    for word in words:
        assert word in message


def test_a_tf_config_that_no_program_can_be_started_with() -> None:
    hosts = ",".join(f"a-rather-long-host-name-{i}:1000" for i in range(5))
    arguments = ("--hosts", hosts, "--task", "worker:0", "--format", "export")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "Linux starts no program with a variable of more than 131061" in result.stderr
    assert result.stdout.startswith("# worker 0\nexport TF_CONFIG=")


# --- This process ---------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "4",
}


def rows(output: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for line in output.splitlines() if (words := line.split())}


def test_who_this_process_is_and_why() -> None:
    output = run("--detect", **SLURM)
    assert rows(output)["slurm"][:2] == ["worker", "1"]
    assert "SLURM_NODELIST=n[1-2]" in output
    assert rows(output)["tf_config"] == ["-", "TF_CONFIG", "is", "not", "set"]
    assert rows(output)["local"] == ["-", "another", "is", "found"]
    assert "This process is worker 1 of 2 workers, by slurm." in output
    assert "Its address is n2:22128; worker 0 is at n1:22128." in output
    assert "GPUs of each task that computes: 4." in output


def test_nobody_has_started_this_process() -> None:
    output = run("--detect")
    assert "This process is worker 0 of 1 worker, by local." in output


def test_roles_and_ports_are_those_asked_for() -> None:
    output = run("--detect", "--ps", "1", "--port", "3000", "--format", "export", **SLURM)
    assert output.startswith("# ps 0\nexport TF_CONFIG=")
    assert '"ps": ["n2:3000"]' in output


def test_ranks_without_addresses() -> None:
    mpi = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    output = run("--detect", **mpi)
    assert "This process is worker 1 of 4 workers, by mpi." in output
    assert "the tasks ask each other" in output
    message = refused("--detect", "--format", "json", **mpi)
    assert "by mpi (PMI_RANK=1, PMI_SIZE=4), and no variable tells the addresses" in message


def test_a_mistake_is_in_the_table_and_ends_the_command() -> None:
    result = CliRunner().invoke(app, ["--detect"], env={**SLURM, "SLURM_PROCID": "x"})
    assert isinstance(result.exception, ConfigError)
    assert "mistake" in result.stdout
    assert "SLURM_PROCID='x'" in result.stdout


def test_tensorflow_is_not_imported() -> None:
    code = """
import sys, typer
from tfdist.cli.config import config
app = typer.Typer()
app.command()(config)
try:
    app()
finally:
    assert not {"tensorflow", "keras", "numpy"} & set(sys.modules)
"""
    command = [sys.executable, "-c", code, "--hosts", "a:2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert tasks(done.stdout) == ["worker 0", "worker 1"]


# --- What the documentation shows -----------------------------------------------------------------


def examples() -> list[tuple[str, str]]:
    """Each command of the page with the output that is shown below it."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for part in block.split("$ ")[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


@pytest.mark.parametrize(("command", "output"), examples(), ids=lambda text: text[:40])
def test_the_documentation_is_true(command: str, output: str) -> None:
    words = shlex.split(command)
    begin = words.index("tfdist")
    environ = dict(word.split("=", 1) for word in words[:begin])
    assert words[begin + 1] == "config"
    if "--environment" in words:
        environ |= SLURM
    shown = run(*words[begin + 2 :], **environ)
    if output:
        assert shown == output
    else:  # The page says in words what comes: a row for each environment, and which one counts.
        rows = {line.split()[0] for line in shown.splitlines() if line.strip()}
        assert set(ENVIRONMENTS) <= rows
        own = "worker 1 of 2 workers, by slurm" if "slurm" in words else "by local"
        assert own in shown


def test_the_examples_of_the_help_work() -> None:
    text = config.__doc__ or ""
    commands = re.findall(r"tfdist config ([^)\n]*)", text)
    assert len(commands) == 3
    for command in commands:
        assert run(*shlex.split(command))
