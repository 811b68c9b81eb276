import json
import pathlib
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tfdist import environment
from tfdist.cli.doctor import doctor
from tfdist.cluster.ports import HeldPorts
from tfdist.config.strategy_config import STRATEGIES

app = typer.Typer()
app.command()(doctor)

WIDE = {"COLUMNS": "200", "TF_CONFIG": None, "NO_COLOR": "1"}
TWO_AT_ONE = json.dumps(
    {
        "cluster": {"worker": ["localhost:12345", "localhost:12345"]},
        "task": {"type": "worker", "index": 0},
    }
)
_WITHOUT_TENSORFLOW = """
import sys, typer
from tfdist.cli.doctor import doctor
app = typer.Typer()
app.command()(doctor)
try:
    app()
finally:
    imported = {"tensorflow", "keras", "numpy"} & set(sys.modules)
    assert not imported, imported
"""


def run(*arguments: str, stdin: str | None = None, **environ: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, input=stdin, env={**WIDE, **environ})
    return result.exit_code, result.output


def test_all_is_well() -> None:
    with HeldPorts(2) as held:
        workers = [str(address) for address in held.addresses]
        content = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}
        status, output = run("--tf-config", json.dumps(content), "--strategy", "multi_worker")
    assert status == 0, output
    assert "All is well: no errors, no warnings." in output
    assert "A cluster of 2 workers; this process is worker 1" in output
    assert "TensorFlow" in output


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_can_be_asked_for(strategy: str) -> None:
    status, output = run("--strategy", strategy, CUDA_VISIBLE_DEVICES="-1")
    assert status == 0, output


def test_a_pipeline_needs_a_chief() -> None:
    content = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    words = ("--tf-config", json.dumps(content), "--elsewhere", "--strategy", "pipeline")
    status, output = run(*words)
    assert status == 1
    assert "It lists no chief" in output


def test_a_mistake_is_shown_with_its_place_and_remedy() -> None:
    status, output = run("--tf-config", TWO_AT_ONE)
    assert status == 1
    (row,) = [line for line in output.splitlines() if "cluster.worker[1]" in line]
    assert row.split()[0] == "error"
    assert '"localhost:12345"' in row
    assert "Give each task" in row
    assert "Not well: 1 error, no warnings." in output


def test_a_warning_is_well() -> None:
    status, output = run("--strategy", "multi_worker")
    assert status == 0
    assert "All is well: no errors, 1 warning." in output


def test_the_environment_is_read() -> None:
    status, output = run(TF_CONFIG="{'cluster'")
    assert status == 1
    assert "This is not JSON" in output
    assert "is from the environment" in output


def test_json_is_pure(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tf_config.json"
    path.write_text(TWO_AT_ONE)
    status, output = run("--file", str(path), "--json")
    report = json.loads(output)
    assert status == 1
    assert report["ok"] is False
    errors = [f["where"] for f in report["findings"] if f["severity"] == "error"]
    assert errors == ["TF_CONFIG.cluster.worker[1]"]


def test_standard_input_is_read() -> None:
    status, output = run("--file", "-", stdin=TWO_AT_ONE)
    assert status == 1
    assert "is from standard input" in output


def test_square_brackets_are_shown_as_they_are() -> None:
    text = json.dumps({"cluster": {"worker": ["[bold]:1"]}, "task": {}})
    assert '"[bold]:1"' in run("--tf-config", text)[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--strategy", "mirorred"], "mirorred"),
        (["--tf-config", "{}", "--file", "x"], "Give one"),
    ],
)
def test_a_wrong_call_is_one_error(arguments: list[str], says: str) -> None:
    status, output = run(*arguments)
    assert status == 2
    assert says in output
    assert "Traceback" not in output


def test_help_has_an_example_that_runs() -> None:
    status, output = run("--help")
    assert status == 0
    (line,) = [line for line in output.splitlines() if "tfdist doctor --tf-config" in line]
    text = line.split("'")[1]
    assert 'There is no "task"' in run("--tf-config", text)[1]
    for option in ("--tf-config", "--file", "--strategy", "--elsewhere", "--json"):
        assert option in output


def test_a_real_process_does_not_import_tensorflow() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TENSORFLOW, "--json", "--tf-config", TWO_AT_ONE],
        env=environment.merged({"TF_CONFIG": None}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
