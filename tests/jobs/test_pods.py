"""`tfdist run --on kubernetes`: pods as processes of this machine, and a stand-in for kubectl.

No cluster is reached here. The pods of a manifest are processes with the environment, the host name
and the names of others that Kubernetes gives them, each on a network of its own; what Kubernetes
itself does with the manifest is not tested. `kubectl` is a small program that notes how it is
called and answers with states written below, in the form of the API: it shows what tfdist does
with such answers, not that a cluster gives them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from tests.cluster.test_manifests import pods_of
from tests.harness.pods import AS_POD, missing, network
from tests.jobs.test_jobs import DEADLINE, SCRIPT, printed, results
from tfdist import environment
from tfdist.cli.main import app
from tfdist.launcher.backends import kubernetes_watch

BIN = Path(sys.executable).parent
ON = ("run", "--on", "kubernetes", "--image", "my/image")
PS = ("--strategy", "parameter_server", "-n", "1", "--ps", "1")
WORKERS = ("--strategy", "multi_worker", "-n", "2")


FILES = {"train.py": SCRIPT}


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


# --- The pods of a manifest, as processes ---------------------------------------------------------


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.core
def test_the_pods_of_a_manifest_train_what_one_process_trains(folder: Path, alone: float) -> None:
    """One chief, one worker and one server, each with what Kubernetes tells its pod."""
    manifest = CliRunner().invoke(app, [*ON, *PS, "--seed", "3", "--dry-run", "train.py", "--own"])
    pods = pods_of(list(yaml.safe_load_all(manifest.stdout)))
    assert [name for name, _, _ in pods] == ["train-chief-0", "train-worker-0", "train-ps-0"]
    with network([name for name, _, _ in pods]) as made, contextlib.ExitStack() as stack:
        lines = [f"{address} {name}.train {name}" for name, (_, address) in made.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        started = {}
        for name, environ, command in pods:
            (folder / name).mkdir()
            shutil.copy("train.py", folder / name)
            inside = ("ip", "netns", "exec", made[name][0], "unshare", "--mount", "--uts")
            started[name] = subprocess.Popen(
                [*inside, "sh", "-c", AS_POD, "sh", str(folder / "hosts"), name, *command],
                cwd=folder / name,
                env={"PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", **environ},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(end, started[name])
        said = {name: pod.communicate(timeout=DEADLINE)[0] for name, pod in started.items()}
    assert {name: pod.returncode for name, pod in started.items()} == dict.fromkeys(made, 0), (
        printed(said)
    )
    (chief,) = results(said["train-chief-0"])
    assert float(chief[0]) == pytest.approx(alone, abs=1e-5)
    assert chief[1] == "['--own'] __main__"
    assert "ps 0 serves at train-ps-0.train:2222" in said["train-ps-0"]
    assert (folder / "train-chief-0/model.keras").exists()


def end(pod: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pod.pid, signal.SIGKILL)
    pod.wait()


# --- kubectl --------------------------------------------------------------------------------------

KUBECTL = """#!{python} -IS
import json, pathlib, sys
here, words = pathlib.Path({folder!r}), sys.argv[1:]
text = sys.stdin.read() if "create" in words else ""
with open(here / "calls", "a") as calls:
    calls.write(json.dumps([words, text]) + "\\n")
verb = next(word for word in words if word in ("create", "get", "logs", "delete"))
if (here / f"refuse-{{verb}}").exists():
    print((here / f"refuse-{{verb}}").read_text(), file=sys.stderr)
    print("service/train") if verb == "create" else None
    sys.exit(1)
if verb == "create":
    whole = json.loads(text)
    for each in whole.get("items", [whole]):
        group = each["apiVersion"].rpartition("/")[0]
        kind = each["kind"].lower() + ("." if group else "") + group
        print(f"{{kind}}/{{each['metadata']['name']}}")
elif verb == "get":
    states = json.loads((here / "states").read_text())
    if len(states) == 1:
        (here / "last").touch()
    seen = [each for each in states[0] if each["kind"] != "Until"]
    words_said = (here / "calls").read_text()
    if all(each["called"] in words_said for each in states[0] if each["kind"] == "Until"):
        (here / "states").write_text(json.dumps(states[1:] or states))
    print(json.dumps({{"items": seen}}))
elif verb == "logs" and "--since" not in " ".join(words):
    print("log of", next(word for word in words if word.startswith("train-")))
"""


class Fake:
    """The stand-in for kubectl: the states that it goes through, and the calls it got."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = folder / "bin/kubectl"
        program.parent.mkdir()
        program.write_text(KUBECTL.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)

    def goes_through(self, *states: list[dict[str, Any]]) -> None:
        (self._folder / "states").write_text(json.dumps(states))

    def refuses(self, verb: str, why: str) -> None:
        (self._folder / f"refuse-{verb}").write_text(why)

    def showed_all(self) -> bool:
        """Whether the last of the states was asked for."""
        return (self._folder / "last").exists()

    def calls(self, verb: str) -> list[list[str]]:
        path = self._folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [words for words, _ in map(json.loads, lines) if verb in words]

    def created(self) -> Any:
        first, *others = (self._folder / "calls").read_text().splitlines()
        assert '"create"' not in "".join(others)
        return json.loads(json.loads(first)[1])


@pytest.fixture
def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The only kubectl that can be found."""
    made = Fake(folder)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.setattr(kubernetes_watch, "_EVERY", 0.05)
    return made


def tfdist(*words: str) -> Result:
    return CliRunner().invoke(app, [*ON, *words, "train.py"])


def job(name: str, condition: str | None = None, kind: str = "Job") -> dict[str, Any]:
    told = {"status": "True", "reason": "Why", "message": "said Kubernetes"}
    conditions = [] if condition is None else [{"type": condition, **told}]
    return {"kind": kind, "metadata": {"name": name}, "status": {"conditions": conditions}}


def pod(hostname: str, phase: str, exit_code: int | None = None, **more: Any) -> dict[str, Any]:
    """A pod of a Job, whose name has five characters more than its host name."""
    ended = {"exitCode": exit_code, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z", **more}
    state = {} if exit_code is None else {"terminated": ended}
    return {
        "kind": "Pod",
        "metadata": {"name": f"{hostname}-ab1cd"},
        "spec": {"hostname": hostname},
        "status": {"phase": phase, "containerStatuses": [{"state": state}]},
    }


def no_room(name: str) -> dict[str, Any]:
    why = {"reason": "Unschedulable", "message": "0/3 nodes have a GPU"}
    found = pod(name, "Pending")
    found["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", **why}]
    return found


def test_a_job_is_made_followed_and_removed(fake: Fake, capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [job("train-chief"), job("train-worker")]
    fake.goes_through(
        [*jobs, no_room("train-chief-0")],
        [*jobs, no_room("train-chief-0")],
        [*jobs, pod("train-chief-0", "Running"), {"kind": "Until", "called": "--since"}],
        [job("train-chief", "Complete"), jobs[1], pod("train-chief-0", "Succeeded", 0)],
        [job("train-chief", "Complete"), job("train-worker", "Complete")],
    )
    done = tfdist(*PS, "--namespace", "ml", "--engine-args", "--context=far")
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("waits: Unschedulable: 0/3 nodes have a GPU") == 1
    assert capfd.readouterr().out == "log of train-chief-0-ab1cd\n"
    assert fake.showed_all(), "the workers did not get the time to end"
    kinds = [each["kind"] for each in fake.created()["items"]]
    assert kinds == ["Service", "Job", "Job", "StatefulSet"]
    whole = ["service/train", "job.batch/train-chief", "job.batch/train-worker"]
    (removed,) = fake.calls("delete")
    assert removed[-4:] == [*whole, "statefulset.apps/train-ps"]
    assert removed[:4] == ["--context=far", "--namespace", "ml", "delete"]
    first, *again = fake.calls("logs")
    assert first[3:] == ["logs", "--follow", "train-chief-0-ab1cd"]
    assert again, "the log ended while the pod ran, and was not taken up again"
    assert all(words[-2].startswith("--since=") for words in again)


def test_the_first_failure_is_the_jobs(fake: Fake, capfd: pytest.CaptureFixture[str]) -> None:
    both = pod("train-0", "Running"), pod("train-1", "Running")
    ended = pod("train-0", "Failed", 143), pod("train-1", "Failed", 17, finishedAt="2026-02")
    fake.goes_through([job("train"), *both], [job("train", "Failed"), *ended])
    done = tfdist(*WORKERS)
    assert done.exit_code == 17
    assert "job train failed: pod train-1-ab1cd ended with exit status 17 (Error)" in done.stderr
    assert "the last lines of train-1-ab1cd:\nlog of train-1-ab1cd" in done.stderr
    assert capfd.readouterr().out == "log of train-0-ab1cd\n"
    (removed,) = fake.calls("delete")
    assert removed[-1] == "service/train"
    assert "job.batch/train" not in removed, "its pods' logs would be lost"
    assert "kubectl delete job,statefulset,service -l tfdist-job=train" in done.stderr


def test_workers_that_fail_take_the_chief_with_them(fake: Fake) -> None:
    failed = [job("train-chief"), job("train-worker", "Failed"), pod("train-worker-0", "Failed", 1)]
    fake.goes_through(failed)
    assert tfdist(*PS).exit_code == 1
    (removed,) = fake.calls("delete")
    assert removed[3:] == ["service/train", "job.batch/train-chief", "statefulset.apps/train-ps"]


def test_a_tfjob(fake: Fake, capfd: pytest.CaptureFixture[str]) -> None:
    chief = pod("other", "Running")
    chief["metadata"]["name"] = "train-chief-0"
    running = [job("train", "Running", "TFJob"), chief]
    fake.goes_through(running, [job("train", "Succeeded", "TFJob"), chief])
    done = tfdist(*PS, "--manifest", "tfjob")
    assert done.exit_code == 0, done.stderr
    assert capfd.readouterr().out == "log of train-chief-0\n"
    assert fake.created()["kind"] == "TFJob"
    assert fake.calls("get")[0][1] == "tfjobs.kubeflow.org,pods"
    (removed,) = fake.calls("delete")
    assert removed[-1] == "tfjob.kubeflow.org/train"


def test_detached(fake: Fake) -> None:
    done = tfdist(*PS, "--detach")
    assert done.exit_code == 0, done.stderr
    assert fake.calls("get") == fake.calls("delete") == []
    assert "kubectl get jobs,pods -l tfdist-job=train" in done.stderr
    assert "servers are started again whenever they end" in done.stderr
    assert "kubectl delete job,statefulset,service -l tfdist-job=train" in done.stderr


def test_what_another_job_left_is_not_touched(fake: Fake) -> None:
    fake.refuses("create", 'jobs.batch "train" already exists')
    done = tfdist(*WORKERS)
    assert done.exit_code == 3
    assert 'jobs.batch "train" already exists' in done.stderr
    assert "--job-name" in done.stderr
    (removed,) = fake.calls("delete")
    assert removed[-1] == "service/train"
    assert "job.batch/train" not in removed


def test_a_cluster_that_does_not_answer(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "_PATIENCE", 0.1)
    fake.refuses("get", "connection refused")
    done = tfdist(*WORKERS)
    assert done.exit_code == 3
    assert "kubectl get jobs,pods has failed for 0.1 s" in done.stderr
    assert "connection refused" in done.stderr
    assert "kubectl delete job,statefulset,service -l tfdist-job=train" in done.stderr


def test_a_call_that_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bin").mkdir()
    (folder / "bin/kubectl").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (folder / "bin/kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.setattr(kubernetes_watch, "_SECONDS", 0.2)
    done = tfdist(*WORKERS)
    assert done.exit_code == 3
    assert "no answer within 0.2 s (kubectl create" in done.stderr


def test_a_job_that_somebody_removes(fake: Fake) -> None:
    fake.goes_through([job("train")], [])
    done = tfdist(*WORKERS)
    assert done.exit_code == 3
    assert "'train' is gone from the cluster" in done.stderr


def test_ctrl_c_removes_the_job(fake: Fake, folder: Path) -> None:
    fake.goes_through([job("train"), pod("train-0", "Pending")])
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdist.cli.main", *ON, *WORKERS, "train.py"],
        env=environment.snapshot(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE
        while not fake.calls("get"):
            assert time.monotonic() < deadline, "the job was not looked at"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert "stopped by SIGINT; the job is removed from the cluster" in said
    assert fake.calls("delete")[0][-2:] == ["service/train", "job.batch/train"]


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        ({"phase": "Running"}, None),
        (
            {"containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]},
            None,
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "no memory"},
            kubernetes_watch.Failure("a", 1, "Evicted: no memory"),
        ),
        (
            {
                "containerStatuses": [
                    {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
                ]
            },
            kubernetes_watch.Failure("a", 137, "exit status 137 (OOMKilled)"),
        ),
        (
            {
                "containerStatuses": [
                    {
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"exitCode": 3, "reason": "Error"}},
                    }
                ]
            },
            kubernetes_watch.Failure("a", 3, "exit status 3 (Error)"),
        ),
    ],
)
def test_how_a_pod_failed(status: dict[str, Any], failure: kubernetes_watch.Failure | None) -> None:
    assert kubernetes_watch.failure(
        [{"kind": "Pod", "metadata": {"name": "a"}, "status": status}]
    ) == (failure)


def test_an_image_that_is_not_there_is_told_and_one_that_is_fetched_is_not() -> None:
    def waits(reason: str) -> dict[str, str]:
        found = pod("train-0", "Pending")
        found["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": reason}}}]
        return kubernetes_watch.waiting([found])

    assert waits("ErrImagePull") == {"train-0-ab1cd": "ErrImagePull"}
    assert waits("ContainerCreating") == {}
