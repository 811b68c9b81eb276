"""Jobs under Slurm: a real one of two nodes, with its own controller and its own addresses."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness.slurm import missing, slurm
from tests.jobs.test_jobs import ENDLESS, ROOT, SCRIPT, TFDIST, results, wait_until_gone
from tfdist import environment

LACKING = missing()
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

#: For a job to start, train a moment and end.
JOB_SECONDS = 240
TWO_NODES = "--nodes=2 --time=10"

FAILS = """
import json, os, sys, time
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
    sys.exit("the disk is full")
time.sleep(1000)
"""

HETEROGENEOUS = """#!/bin/sh
#SBATCH --ntasks=1 --output=job.out
#SBATCH hetjob
#SBATCH --ntasks=2 --gpus-per-task=1
srun --het-group=0-1 sh -c '"$@" > place-$SLURM_PROCID.json; env > env-$SLURM_PROCID' sh "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


FILES = {"train.py": SCRIPT, "endless.py": ENDLESS, "fails.py": FAILS}


@pytest.fixture
def folder(cluster, folder):
    yield folder
    cluster.ask("scancel", "--user=root")
    cluster.wait_for(seconds=45)


def start(cluster, folder, *words, **environ):
    return subprocess.Popen(
        cluster.on("n1", *words),
        cwd=folder,
        env=cluster.environ(**environ),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finished(job):
    """The exit status, standard output and standard error of a command."""
    try:
        out, error = job.communicate(timeout=JOB_SECONDS)
    finally:
        job.kill()
        job.wait()
    return job.returncode, out, error


def submitted(cluster, folder, *words, **environ):
    """The number of a batch job that has ended, and what Slurm knows of it."""
    job = start(cluster, folder, "sbatch", "--parsable", *words, **environ)
    status, out, error = finished(job)
    assert status == 0, error
    cluster.wait_for(seconds=JOB_SECONDS)  # `sbatch --wait` looks every ten seconds only.
    return out.strip(), cluster.ask("scontrol", "show", "job", out.strip())


def on_slurm(*options):
    return (*TFDIST, "run", "--on", "slurm", *options)


@pytest.mark.core
def test_a_batch_job_trains_what_one_process_trains(cluster, folder, alone):
    options = ("-s", "multi_worker", "-n", 2, "--seed", 3, "--engine-args", TWO_NODES)
    job = start(cluster, folder, *on_slurm(*options, "--job-name", "a b", "train.py", "--own"))
    status, out, error = finished(job)
    assert status == 0, error
    ((loss, arguments),) = results(out)
    assert float(loss) == pytest.approx(alone, 1e-5)
    assert arguments == "['--own'] __main__"
    assert re.search(r"worker 1 at n2:\d+", error)
    logs = folder / "tfdist-logs/latest"
    assert f"RESULT {loss}" in (logs / "worker-1.log").read_text()
    assert "#SBATCH '--job-name=a b'" in (logs / "job.sbatch").read_text()
    assert cluster.jobs() == []


@pytest.mark.seldom  # As a batch job of workers, above.
def test_the_script_for_sbatch_trains_workers_and_servers(cluster, folder, alone):
    script = ROOT / "cluster/slurm.sbatch"
    path = f"{Path(TFDIST[0]).parent}:{environment.snapshot()['PATH']}"
    submit = ("--nodes=2", "--ntasks=4", script, "--seed", 3, "train.py", "--own")
    more = {"PATH": path, "STRATEGY": "parameter_server", "SERVERS": "1", "MODE": "sync"}
    job, state = submitted(cluster, folder, *submit, **more)
    said = {each.name: each.read_text() for each in folder.glob("slurm-*.out")}
    assert "JobState=COMPLETED" in state, said
    ((loss, arguments),) = results(said[f"slurm-{job}-0.out"])
    assert float(loss) == pytest.approx(alone, 1e-5)
    assert arguments == "['--own'] __main__"
    assert [results(said[f"slurm-{job}-{rank}.out"]) for rank in (1, 2, 3)] == [[], [], []]
    nodes = re.findall(r"(?:worker|ps) \d at (n\d):", said[f"slurm-{job}-0.out"])
    assert sorted(set(nodes)) == ["n1", "n2"]
    assert cluster.jobs() == []  # The servers have ended with the chief.


# test_gallery.py goes on at a backup in each `make test`; the script for the array differs from
# slurm.sbatch, tested above, in its first lines.
@pytest.mark.seldom
def test_the_jobs_of_an_array_train_one_after_the_other(cluster, folder):
    shutil.copytree(ROOT / "examples", folder / "examples")
    path = f"{Path(TFDIST[0]).parent}:{environment.snapshot()['PATH']}"
    script, example = ROOT / "cluster/slurm_array.sbatch", "examples/resumable.py"
    words = ("--array=1-5%1", "--nodes=2", script, example, "--lose-power-at", "50")
    job, _ = submitted(cluster, folder, *words, PATH=path)
    said = (folder / f"slurm-{job}-0.out").read_text()
    # The power fails at updates 50, 90 and 130; the backups before are those of 40, 80 and 120.
    assert said.count("exit status 75") == 3, said
    assert re.search(r"accuracy on unseen digits .* after 132 updates", said)
    assert (folder / f"tfdist-logs/slurm-{job}.finished").is_file()
    last = (folder / f"slurm-{job}_5.out").read_text()
    assert last == "finished by an earlier job of the array\n"


@pytest.mark.seldom  # tests/cli/test_init.py looks at the script.
def test_the_batch_script_of_init_trains_on_both_nodes(cluster, folder):
    made = start(cluster, folder, *TFDIST, "init", "first", "--slurm")
    assert finished(made)[0] == 0
    first = folder / "first"
    job, state = submitted(cluster, first, "--nodes=2", "train.sbatch", "--epochs=1")
    said = (first / f"slurm-{job}.out").read_text()
    assert "JobState=COMPLETED" in state, said
    assert "validation accuracy" in said
    assert re.search(r"worker 1 at n2:\d+", said)


def test_a_task_that_fails_ends_the_job_and_is_named(cluster, folder):
    options = ("-s", "multi_worker", "-n", 2, "--engine-args", TWO_NODES, "fails.py")
    status, _, error = finished(start(cluster, folder, *on_slurm(*options)))
    assert status == 1
    assert "tfdist: worker 1 on n2 failed with exit status 1." in error
    assert "\n  the disk is full\n" in error
    assert cluster.jobs() == []


def test_in_an_allocation_srun_starts_the_tasks_and_signals_reach_them(cluster, folder):
    allocated = cluster.on("n1", "salloc", "--no-shell", "--ntasks=1", "--job-name=mine")
    said = subprocess.run(
        allocated, env=cluster.environ(), text=True, capture_output=True, timeout=60, check=True
    )
    number = re.findall(r"Granted job allocation (\d+)", said.stderr)[0]
    inside = {"SLURM_JOB_ID": number, "SLURM_NTASKS": "1"}
    job = start(cluster, folder, *on_slurm("-s", "single", "endless.py"), **inside)
    try:
        assert _line_with("STARTED", job) == "STARTED\n"
        steps = cluster.ask("squeue", "--steps", "--noheader", "--format=%j").split()
        assert f"endless-{job.pid}" in steps
        job.send_signal(signal.SIGTERM)
    finally:
        status, _, error = finished(job) if job.poll() is None else (job.returncode, "", "")
    assert status == 128 + signal.SIGTERM
    assert error.count("tfdist: Stopped by SIGTERM.") == 2, error  # The task's and the launcher's.
    assert wait_until_gone(folder, 30) == []
    assert cluster.jobs() == ["RUNNING"]  # The allocation is the user's.


def _line_with(word, job):
    """The first line of a command's output that has a word."""
    deadline = time.monotonic() + JOB_SECONDS
    while time.monotonic() < deadline and (line := job.stdout.readline()):
        if word in line:
            return line
    raise AssertionError(f"no {word}: {job.stderr.read() if job.poll() is not None else ''}")


def test_a_job_that_waits_says_why_and_ctrl_c_cancels_it(cluster, folder):
    job = start(cluster, folder, *on_slurm("--engine-args", "--begin=now+1hour", "train.py"))
    said = ""
    while "waits: " not in said and job.poll() is None:
        said += job.stderr.readline()
    assert "waits: BeginTime" in said
    assert cluster.jobs() == ["PENDING"]
    job.send_signal(signal.SIGINT)
    status, _, error = finished(job)
    assert status == 128 + signal.SIGINT, error
    assert cluster.jobs() == []


def test_term_cancels_a_job_that_runs(cluster, folder):
    job = start(cluster, folder, *on_slurm("-s", "single", "endless.py"))
    try:
        cluster.wait_for("RUNNING")
        job.send_signal(signal.SIGTERM)
    finally:
        status, _, error = finished(job)
    assert status == 128 + signal.SIGTERM, error
    assert cluster.jobs() == []
    assert wait_until_gone(folder, 30) == []


def test_a_detached_job_is_left_alone(cluster, folder):
    hold = ("--engine-args", "--begin=now+1hour")
    status, _, error = finished(start(cluster, folder, *on_slurm("--detach", *hold, "train.py")))
    number = re.findall(r"this cancels it: scancel (\d+)", error)[0]
    assert status == 0
    assert cluster.jobs() == ["PENDING"]
    assert cluster.ask("squeue", "--noheader", "--format=%i") == number


def test_slurms_own_words_where_it_takes_no_job(cluster, folder):
    options = on_slurm("--engine-args", "--partition=nowhere", "train.py")
    status, _, error = finished(start(cluster, folder, *options))
    assert status == 3
    assert "invalid partition" in error.lower()


def test_all_groups_of_a_heterogeneous_job_are_one_cluster(cluster, folder):
    (folder / "job.sh").write_text(HETEROGENEOUS)
    detect = (*TFDIST, "config", "--detect", "--environment", "slurm", "--format", "json")
    _, state = submitted(cluster, folder, "job.sh", *detect)
    assert "JobState=COMPLETED" in state, (folder / "job.out").read_text()
    places = [json.loads((folder / f"place-{rank}.json").read_text()) for rank in range(3)]
    first, second, third = places[0]["cluster"]["worker"]
    assert [address.split(":")[0] for address in (first, second, third)] == ["n1", "n2", "n2"]
    assert all(place["cluster"] == places[0]["cluster"] for place in places)
    assert [place["task"]["index"] for place in places] == [0, 1, 2]
