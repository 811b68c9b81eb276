"""What `--on slurm` tells Slurm, and how it reads what Slurm tells, without Slurm."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tfdist import environment
from tfdist.cli import planning
from tfdist.cli.backends.base import EngineOptions, Order
from tfdist.cli.backends.slurm import Slurm
from tfdist.cli.request import Request
from tfdist.errors import ConfigError, StartError
from tfdist.launcher.backends import slurm
from tfdist.launcher.backends.slurm import (
    Echo,
    Failure,
    JobState,
    Step,
    batch_script,
    call,
    failures,
    job_state,
    output_files,
    srun,
)
from tfdist.launcher.supervisor import Requests

ALLOCATED = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "3"}
TASK = {
    **{"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    **{"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1"},
}

#: Notes its arguments, and is each task by itself.
SRUN = """#!/bin/sh
printf '%s\\n' "$@" >"$0.said"
while test "$1" != sh; do shift; done
exec "$@"
"""


def step(**more: Any) -> Step:
    return Step(
        **{"name": "t", "tasks": 2, "command": ("echo", "a b"), "log_dir": Path("/logs"), **more}
    )


def order(strategy: str | None = None, detach: bool = False, **given: Any) -> Order:
    ours = ("engine_args", "gpus_per_task", "job_name")
    options = {name: given.pop(name) for name in ours if name in given}
    hosts = given.pop("hosts", None)
    request = Request(
        script="a/train.py",
        args=("--own",),
        strategy=strategy,
        strategy_options=given,
        log_dir=Path("/logs"),
        hosts=hosts,
        dry_run=True,
    )
    resolved = planning.resolved_for(request)
    return Order(
        request=request,
        resolved=resolved,
        words=() if strategy is None else ("--strategy", strategy),
        options=EngineOptions(**options, detach=detach),
        grace=5.0,
    )


def printed(
    asked: Order, capsys: pytest.CaptureFixture[str], environ: dict[str, str] | None = None
) -> str:
    own = {name: None for name in environment.snapshot() if name.startswith("SLURM_")}
    with environment.patched({**own, **(environ or {})}):
        assert Slurm(asked).run() == 0
    return capsys.readouterr().out


def test_outside_a_dry_run_prints_the_batch_script(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"engine_args": "--partition=long --comment='a b'", "gpus_per_task": 2}
    asked = order("parameter_server", processes=2, ps=1, job_name="my job", **options)
    shebang, *lines = printed(asked, capsys).splitlines()
    assert shebang == "#!/bin/sh"
    assert [line.removeprefix("#SBATCH ") for line in lines if line[0] == "#"] == [
        "'--job-name=my job'",
        "--ntasks=4",
        "--gpus-per-task=2",
        "--output=/logs/job-%j.out",
        "--error=/logs/job-%j.err",
        "--partition=long '--comment=a b'",
    ]
    words = shlex.split(" ".join(line.removesuffix("\\") for line in lines if line[0] != "#"))
    assert words[:4] == ["exec", "srun", "--ntasks=4", "--kill-on-bad-exit=1"]
    tail = "run --environment slurm --strategy parameter_server --ps 1 --log-dir /logs a/train.py"
    assert words[words.index("run") :] == [*tail.split(), "--own"]
    assert not Path("/logs").exists()


def test_a_script_runs_what_it_says(tmp_path: Path) -> None:
    """With a stand-in for `srun`: what the shell makes of the script is what was meant."""
    place = tmp_path / "50% off"
    place.mkdir()
    stand_in = tmp_path / "srun"
    stand_in.write_text(SRUN)
    stand_in.chmod(0o755)
    code = "import os, sys; print('out', sys.argv[1:]); print('err', file=sys.stderr)"
    text = batch_script(step(command=("python3", "-c", code, "it's", "$HOME"), log_dir=place))
    said = {}
    for rank in ("0", "1"):
        path = f"{tmp_path}:{os.defpath}:{environment.snapshot()['PATH']}"
        done = subprocess.run(
            ["sh", "-c", text],
            env={"PATH": path, "SLURM_PROCID": rank, "SLURM_CPUS_PER_TASK": "3"},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        said[rank] = (done.stdout, done.stderr)
    assert said == {"0": ("out [\"it's\", '$HOME']\n", "err\n"), "1": ("", "")}
    assert (place / "rank-1.err").read_text() == "err\n"
    assert "--cpus-per-task=3" in (tmp_path / "srun.said").read_text().splitlines()
    assert f"--output={tmp_path}/50%% off/job-%j.out" in text
    assert output_files(place, "9")[0].name == "job-9.out"


def test_inside_a_dry_run_prints_srun(capsys: pytest.CaptureFixture[str]) -> None:
    asked = order("multi_worker", processes=2, gpus_per_task=1, engine_args="--mem=0")
    words = shlex.split(printed(asked, capsys, ALLOCATED))
    assert words[1] == f"--job-name=train-{os.getpid()}"
    expected = "--ntasks=2 --cpus-per-task=3 --gpus-per-task=1 --kill-on-bad-exit=1 --mem=0 sh -c"
    assert words[2:9] == expected.split()


@pytest.mark.parametrize(
    ("strategy", "given", "tasks"),
    [
        ("multi_worker", {}, 4),
        (None, {}, 4),
        ("parameter_server", {"ps": 1}, 4),
        ("multi_worker", {"processes": 2}, 2),
        ("single", {}, 1),
        ("mirrored", {}, 1),
    ],
)
def test_the_allocation_says_how_many_tasks(
    capsys: pytest.CaptureFixture[str], strategy: str | None, given: dict[str, int], tasks: int
) -> None:
    words = shlex.split(printed(order(strategy, **given), capsys, ALLOCATED))
    assert f"--ntasks={tasks}" in words
    chosen = "multi_worker" if strategy is None else strategy
    assert words[words.index("--strategy") + 1] == chosen


def test_an_allocation_that_is_too_small_for_the_roles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="SLURM_NTASKS=4 leaves no worker"):
        printed(order("parameter_server", ps=3), capsys, ALLOCATED)


def test_a_task_of_a_step_starts_no_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"itself one \(SLURM_JOB_ID=7"):
        printed(order("multi_worker"), capsys, {**ALLOCATED, **TASK})


def test_what_conflicts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--detach conflicts with the allocation"):
        printed(order("multi_worker", detach=True), capsys, ALLOCATED)
    with pytest.raises(ConfigError, match="--nodelist=a,b"):
        printed(order("multi_worker", hosts="a:2"), capsys)
    with pytest.raises(ConfigError, match="cannot be split into words"):
        printed(order("multi_worker", engine_args="'a"), capsys)


def test_without_slurm(tmp_path: Path) -> None:
    asked = order("multi_worker")
    asked = dataclasses.replace(asked, request=dataclasses.replace(asked.request, dry_run=False))
    own = {name: None for name in environment.snapshot() if name.startswith("SLURM_")}
    with (
        environment.patched({**own, "PATH": str(tmp_path)}),
        pytest.raises(ConfigError, match="needs sbatch, which is not in PATH"),
    ):
        Slurm(asked).run()


def test_failures_are_read_from_sruns_words() -> None:
    said = """srun: error: n2: task 1: Exited with exit code 7
srun: launch/slurm: _step_signal: Terminating StepId=2.0
slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***
the script says: error: n9: task 5: Exited with exit code 9
srun: error: n1: tasks 0,2-3: Exited with exit code 143
srun: error: n3: task 4: Killed
srun: error: n3: task 6: Segmentation fault (core dumped)
srun: error: n1: task 0: Exited with exit code 1
srun: error: slurm_receive_msgs: Socket timed out on send/recv operation"""
    assert failures(said.splitlines()) == (
        Failure(1, "n2", 7, stopped=False),
        *(Failure(rank, "n1", -signal.SIGTERM, stopped=True) for rank in (0, 2, 3)),
        Failure(4, "n3", -signal.SIGKILL, stopped=True),
        Failure(6, "n3", -signal.SIGSEGV, stopped=True),
    )
    assert failures([]) == ()


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (
            "JobId=6 JobState=PENDING Reason=Resources ExitCode=0:0 ReqNodeList=n7 NodeList=(null)",
            JobState("PENDING", "Resources"),
        ),
        (
            "JobState=RUNNING Reason=None ExitCode=0:0 ReqNodeList=(null) NodeList=n[1-2] X=1",
            JobState("RUNNING", nodes="n[1-2]"),
        ),
        (
            "JobState=FAILED Reason=NonZeroExitCode ExitCode=7:0",
            JobState("FAILED", "NonZeroExitCode", 7),
        ),
        ("JobState=CANCELLED ExitCode=0:15", JobState("CANCELLED", status=143)),
        ("slurm_load_jobs error: Invalid job id specified", None),
    ],
)
def test_states_of_jobs(text: str, state: JobState | None) -> None:
    assert job_state(text) == state


def test_echo_passes_all_on_and_keeps_slurms_lines() -> None:
    out, into = os.pipe()
    echo = Echo(into)
    for part in (b"a\nsrun: er", b"ror: x\nsru", b"n\nslurmstepd-n1: y\n\xff", b"srun: z"):
        echo.feed(part)
    os.close(into)
    with open(out, "rb") as stream:
        assert stream.read() == b"a\nsrun: error: x\nsrun\nslurmstepd-n1: y\n\xffsrun: z"
    assert echo.lines == ["srun: error: x", "slurmstepd-n1: y"]
    assert echo.midline


def test_a_slurm_that_does_not_answer_is_borne_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for `scontrol` that fails at first; then one that always fails."""
    scontrol = tmp_path / "scontrol"
    heal = f"test -e {tmp_path}/down || exec echo JobState=FAILED ExitCode=3:0"
    scontrol.write_text(f"#!/bin/sh\n{heal}\nrm {tmp_path}/down\necho no controller >&2\nexit 1\n")
    scontrol.chmod(0o755)
    (tmp_path / "down").touch()
    path = f"{tmp_path}:{environment.snapshot()['PATH']}"
    monkeypatch.setattr(slurm, "_TO_SETTLE", 0.0)
    with environment.patched({"PATH": path}):
        state, _ = slurm.watch("5", tmp_path, Requests(), lambda text, new_line: None)
        assert state == JobState("FAILED", status=3)
        scontrol.write_text("#!/bin/sh\necho no controller >&2\nexit 1\n")
        monkeypatch.setattr(slurm, "_PATIENCE", 0.5)
        begun = time.monotonic()
        with pytest.raises(StartError, match=r"nothing of job 5 .*no controller.* scancel 5"):
            slurm.watch("5", tmp_path, Requests(), lambda text, new_line: None)
        assert time.monotonic() - begun < 20


def test_calls_have_a_deadline() -> None:
    with pytest.raises(StartError, match="sleep has not answered for 0 s"):
        call("sleep", "5", seconds=0.2)
    with pytest.raises(StartError, match="nowhere cannot be run"):
        call("nowhere")


def test_srun_takes_the_users_arguments_last() -> None:
    words = srun(step(arguments=("--ntasks-per-node=1",)), cpus_per_task="2")
    assert words.index("--ntasks-per-node=1") > words.index("--cpus-per-task=2")
    assert words[-2:] == ("echo", "a b")
