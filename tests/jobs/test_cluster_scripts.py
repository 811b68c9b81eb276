"""The bootstrap scripts of `cluster/`, run as their first lines say; and tasks of a scheduler."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness.hosts import FAR, NEAR, missing, two_hosts
from tests.jobs.test_jobs import ROOT, SCRIPT, left_over, printed
from tfdist import environment

BIN = Path(sys.executable).parent
SCRIPTS = ROOT / "cluster"


FILES = {"train.py": SCRIPT}


def run(folder, *command, **environ):
    path = f"{BIN}:{environment.snapshot()['PATH']}"
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=environment.merged({"PATH": path, **environ}),
        text=True,
        capture_output=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_over(folder) == []
    return re.findall(r"^RESULT (\S+) (.*)$", done.stdout, re.MULTILINE)


def test_local_ps(folder):
    ((_, arguments),) = run(folder, SCRIPTS / "local_ps.sh", "train.py", "--own", SERVERS="1")
    assert arguments == "['--own'] __main__"


@pytest.mark.seldom  # test_horovod.py has a job of mpirun.
def test_mpirun(folder):
    root = "--allow-run-as-root --oversubscribe"
    found = run(folder, SCRIPTS / "mpirun.sh", "train.py", MPI_ARGS=root)
    assert len(found) == 2
    assert found[0] == found[1]


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_ssh_ps(folder, tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        script = hosts.on_near(SCRIPTS / "ssh_ps.sh", f"{NEAR}:1,{FAR}:1", "train.py")
        assert len(run(folder, *script, SSH_ARGS=hosts.ssh_args)) == 1


def test_every_script_is_listed_and_says_its_command():
    readme = (SCRIPTS / "README.md").read_text()
    for path in SCRIPTS.glob("*.sh"):
        assert f"`{path.name}`" in readme
        assert f"\n#     cluster/{path.name} " in path.read_text()


def test_programs_of_a_slurm_step_find_each_other(folder):
    """The variables of `srun`, on this machine: `srun python own.py` needs no launcher."""
    own = "import tfdist\nwith tfdist.strategy('multi_worker').scope():\n"
    (folder / "own.py").write_text(own + textwrap.indent(SCRIPT, "    "))
    jobs = [
        subprocess.Popen(
            [sys.executable, "own.py"],
            cwd=folder,
            env=environment.merged(slurm(rank)),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    said = [job.communicate(timeout=150) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], printed(said)
    losses = {number for out, _ in said for number in re.findall(r"^RESULT (\S+)", out, re.M)}
    assert len(losses) == 1


def slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": str(rank),
    }
